"""What a reader needs of a corpus, and the one place that opens those of a job."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from phalanx.config import Data
from phalanx.config.own_code import load_class
from phalanx.data.corpus.opening import (
    one_side,
    open_whole,
    refuse_mixed_tokenizers,
    refuse_other_layout,
)
from phalanx.data.corpus.stream import TokenPosition, TokenStream, number_documents
from phalanx.data.corpus.synthetic import SyntheticSource
from phalanx.data.errors import DataError
from phalanx.data.own_corpus import OwnCorpus

if TYPE_CHECKING:
    from phalanx.data.remote.shards import RemoteStream

Split = Literal["train", "validation"]
Window = NDArray[np.int64]  # [sequence + 1]


_EXPECTED_RUNS = 1024  # remembered as asked for: far more than are ever ahead


class SampleSource(Protocol):
    """A corpus cut into samples of ``sequence + 1`` tokens, each readable by its index."""

    @property
    def vocab(self) -> int:
        """Number of different tokens that may occur."""

    @property
    def samples(self) -> int:
        """Number of samples."""

    @property
    def fingerprint(self) -> str:
        """Short identity of the content: equal only when every sample is equal."""

    def read(self, indices: Sequence[int], rows: Iterable[Window]) -> None:
        """Fill each row with the tokens of a sample; ``DataError`` where any is damaged."""

    def documents(self, indices: Sequence[int], tokens: NDArray[np.int64]) -> NDArray[np.int32]:
        """Document number of each position, from 0 in each sample; tokens: [samples, sequence]."""

    def silent(self, indices: Sequence[int]) -> NDArray[np.bool_] | None:
        """Labels [samples, sequence] that the corpus gives no weight; None where it gives all."""

    def place(self, index: int) -> TokenPosition | None:
        """Where a sample begins on disk; None for one that is made up."""

    def expect(self, indices: NDArray[np.int64]) -> None:
        """Prepare to read samples soon; those that lie at hand need no preparation."""


class Windows:
    """A stream of tokens as samples that share their edge token.

    With ``check_tokens`` the checksums of so many tokens are compared at once, before the first
    sample among them is read. ``remote`` is the corpus of which the stream is a side, where it
    has to be fetched. Where samples are ``packed``, the last token of one has no label.
    """

    def __init__(
        self,
        stream: TokenStream,
        sequence: int,
        check_tokens: int = 0,
        remote: RemoteStream | None = None,
        packed: bool = False,
    ) -> None:
        self.vocab, self.fingerprint = stream.vocab, stream.fingerprint
        # The label of a sample's last position is the first token of the next sample.
        self._edge = 0 if packed else 1
        self.samples = (stream.tokens - self._edge) // sequence
        self._stream, self._sequence = stream, sequence
        self._checked_together = check_tokens and max(1, check_tokens // sequence)
        self._sound: set[int] = set()  # runs of samples whose checksums were found right
        self._remote = remote
        self._expected: OrderedDict[int, None] = OrderedDict()  # runs that were asked for

    def read(self, indices: Sequence[int], rows: Iterable[Window]) -> None:
        """Fill each row with the tokens of a sample; ``DataError`` where any is damaged."""
        if self._checked_together:
            for index in indices:
                if index // self._checked_together not in self._sound:
                    self._check(index)
        sequence = self._sequence
        if not self._edge:
            rows = [_without_edge(row) for row in rows]
        self._stream.read_rows([index * sequence for index in indices], rows)

    def documents(self, indices: Sequence[int], tokens: NDArray[np.int64]) -> NDArray[np.int32]:
        """Document number of each position, from 0 in each sample; tokens: [samples, sequence]."""
        end = self._stream.end_of_document
        if end is not None:
            return number_documents(tokens, end)
        numbers = np.zeros(tokens.shape, np.int32)
        for row, index in zip(numbers, indices, strict=True):
            first = index * self._sequence
            row[self._stream.document_starts(first + 1, self._sequence - 1) - first] = 1
        return np.cumsum(numbers, axis=1, dtype=np.int32)

    def silent(self, indices: Sequence[int]) -> NDArray[np.bool_] | None:
        """Labels [samples, sequence] that the corpus gives no weight; None where it gives all."""
        if not self._stream.masked:
            return None
        counts = np.zeros((len(indices), self._sequence), np.uint8)
        length = self._sequence - 1 + self._edge
        for row, index in zip(counts, indices, strict=True):
            # The label of a position is the token after it.
            self._stream.read_mask(index * self._sequence + 1, length, row[:length])
        silent: NDArray[np.bool_] = counts == 0
        return silent

    def place(self, index: int) -> TokenPosition | None:
        """Where a sample begins on disk."""
        return self._stream.place(index * self._sequence)

    def expect(self, indices: NDArray[np.int64]) -> None:
        """Begin to fetch the blocks of samples that will be read soon."""
        if self._remote is None:
            return
        for run in np.unique(indices // self._checked_together).tolist():
            if run in self._expected:
                continue
            self._expected[run] = None
            if len(self._expected) > _EXPECTED_RUNS:
                self._expected.popitem(last=False)
            first = run * self._checked_together * self._sequence
            last = min(first + self._checked_together * self._sequence, self._stream.tokens - 1)
            for token in [*range(first, last, self._remote.part_tokens), last]:
                self._remote.request(self._stream.place(token))

    def _check(self, index: int) -> None:
        run = index // self._checked_together
        first = run * self._checked_together
        past = min(first + self._checked_together, self.samples)
        try:
            tokens = (past - first) * self._sequence + self._edge
            self._stream.check(first * self._sequence, tokens)
        except DataError:
            # Something in the run is damaged; whether it is this sample, its own blocks tell.
            self._stream.check(index * self._sequence, self._sequence + self._edge)
        else:
            self._sound.add(run)


def _without_edge(row: Window) -> Window:
    """The sample's own part of a row; what follows it is no label."""
    row[-1] = 0
    return row[:-1]


class SampleRange:
    """A run of the samples of a source that has no documents to hold out."""

    def __init__(self, whole: SampleSource, first: int, samples: int) -> None:
        self.vocab, self.fingerprint = whole.vocab, f"{whole.fingerprint}+{first}:{samples}"
        self.samples = samples
        self._whole, self._first = whole, first

    def read(self, indices: Sequence[int], rows: Iterable[Window]) -> None:
        """Fill each row with the tokens of a sample."""
        self._whole.read([self._first + index for index in indices], rows)

    def documents(self, indices: Sequence[int], tokens: NDArray[np.int64]) -> NDArray[np.int32]:
        """Document number of each position, from 0 in each sample; tokens: [samples, sequence]."""
        return self._whole.documents([self._first + index for index in indices], tokens)

    def silent(self, indices: Sequence[int]) -> NDArray[np.bool_] | None:
        """Labels [samples, sequence] that the corpus gives no weight; None where it gives all."""
        return self._whole.silent([self._first + index for index in indices])

    def place(self, index: int) -> TokenPosition | None:
        """Where a sample begins on disk."""
        return self._whole.place(self._first + index)

    def expect(self, indices: NDArray[np.int64]) -> None:
        """Prepare to read samples soon."""
        self._whole.expect(indices + self._first)


def open_sources(data: Data, vocab: int, split: Split = "train") -> dict[str, SampleSource]:
    """Open what ``data`` names, by name, for a model of ``vocab`` tokens.

    Sources of a blend that no stage draws from are left out, whatever is wrong with them.
    """
    if data.source == "synthetic":
        whole = SyntheticSource(vocab=vocab, sequence=data.sequence, seed=data.seed)
        return {"synthetic": held_out_part(whole, data, split)}
    if data.source == "module":
        own = load_class("data.module", data.module, OwnCorpus)(data, vocab)
        return {"own": held_out_part(own, data, split)}
    paths = {name: data.blend[name].path for name in drawn_from(data)}
    if not data.blend:
        paths = {"corpus": data.path}
    strict = data.on_damage == "error"
    corpora = {name: open_whole(path, vocab, data.store, strict) for name, path in paths.items()}
    streams = {
        name: one_side(whole, paths[name], vocab, data.validation_fraction, split)
        for name, whole in corpora.items()
    }
    refuse_mixed_tokenizers(streams)
    packed = {name: refuse_other_layout(corpora[name], data, paths[name]) for name in corpora}
    for name, stream in streams.items():
        _refuse_short(stream, data, paths[name], split, packed[name])
    return {
        name: Windows(
            stream,
            data.sequence,
            _check_tokens(data, stream, "://" in paths[name]),
            corpora[name] if "://" in paths[name] else None,  # type: ignore[arg-type]
            packed[name],
        )
        for name, stream in streams.items()
    }


def refuse_unreadable(data: Data, vocab: int, split: Split = "train") -> None:
    """Raise ``DataError`` for what is wrong with a job's sources, before any rank starts.

    Object stores are left to the ranks: their client's threads would not survive a fork. So is
    a job's own code.
    """
    if data.source == "module":
        return
    local = {name: source for name, source in data.blend.items() if "://" not in source.path}
    if "://" in data.path or (data.blend and not local):
        return
    open_sources(msgspec.structs.replace(data, blend=local), vocab, split)


def drawn_from(data: Data) -> list[str]:
    """Names of the sources of a blend that the start or a stage gives a weight."""
    return [
        name
        for name, source in data.blend.items()
        if source.weight > 0 or any(stage.weights.get(name, 0) > 0 for stage in data.stages)
    ]


def without_idle_sources(data: Data) -> Data:
    """The settings with only those sources of the blend that are drawn from."""
    used = {name: data.blend[name] for name in drawn_from(data)}
    return msgspec.structs.replace(data, blend=used)


def held_out_part(whole: SampleSource, data: Data, split: Split) -> SampleSource:
    """One side of a source without documents: its last samples are held out."""
    samples, fraction, key = whole.samples, data.validation_fraction, "data.validation_fraction"
    held_out = max(1, int(samples * fraction)) if fraction > 0 else 0
    if split == "validation" and held_out == 0:
        rule = "no samples are held out to validate on"
        raise DataError(key, fraction, rule, "set it to a share such as 0.01")
    if samples - held_out < 1:
        rule = f"the corpus has only {samples} samples of {data.sequence} tokens: none to train on"
        raise DataError(key, fraction, rule, "lower data.sequence, or use a larger corpus")
    if held_out == 0:
        return whole
    if split == "validation":
        return SampleRange(whole, samples - held_out, held_out)
    return SampleRange(whole, 0, samples - held_out)


def _check_tokens(data: Data, stream: TokenStream, remote: bool) -> int:
    """How many tokens are checked at once: a block of the order, where it reads whole blocks."""
    if data.shuffle == "blocked" or remote:
        return data.block_tokens
    # Read at random, a sample costs the checksums of all it touches: only where asked for.
    return stream.block_tokens if data.check_blocks or data.on_damage == "weightless" else 0


def _refuse_short(stream: TokenStream, data: Data, path: str, split: Split, packed: bool) -> None:
    if stream.tokens > data.sequence or (packed and stream.tokens):
        return
    is_part = split == "validation" or data.validation_fraction > 0
    what = f"{split} side" if is_part else "corpus"
    fixes = [f"set data.sequence to {stream.tokens - 1} or less"] if stream.tokens > 1 else []
    if is_part:
        change = "raise" if split == "validation" else "lower"
        fixes.append(f"{change} data.validation_fraction ({data.validation_fraction})")
    raise DataError(
        "data.sequence",
        data.sequence,
        f"one sample needs {data.sequence + 1} tokens, and the {what} of {path} has "
        f"{stream.tokens}",
        ", or ".join(fixes) or "use a larger corpus",
    )
