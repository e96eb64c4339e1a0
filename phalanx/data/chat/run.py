"""From conversations to token shards whose samples hold whole conversations.

The shards depend on the lines, their order, the tokenizer and its template alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from jinja2 import TemplateError

from phalanx.data.chat.encode import ChatEncoder, Conversation, NotAppended
from phalanx.data.chat.records import ChatRecord, Record, read_records
from phalanx.data.chat.template import CONFIG_NAME, TEMPLATE_NAME, Rendered
from phalanx.data.corpus.index import document_hash
from phalanx.data.corpus.manifest import TOKENIZER_NAME, CorpusManifest, CorpusOrigin
from phalanx.data.corpus.writer import FILE_BYTES, SampleLayout, ShardWriter
from phalanx.data.durable_files import write_atomically
from phalanx.data.errors import DataError
from phalanx.data.folder_lock import alone_in
from phalanx.data.pack.best_fit import BestFit
from phalanx.data.tokenize.records import Unreadable
from phalanx.data.tokenize.run import FEW_UNREADABLE, MOST_NAMED, UNREADABLE_NAME

_ENCODED_AT_ONCE = 256  # records


class ChatOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How conversations become samples."""

    sequence: int  # tokens of a sample, as data.sequence of the job
    pairs: bool = False
    pack: bool = True
    messages_key: str = "messages"
    file_bytes: int = FILE_BYTES
    replace: bool = False
    inputs: tuple[str, ...] = ()
    most_unreadable: float = 0.05


class PreparedChat(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of ``prepare_chat``."""

    manifest: CorpusManifest
    samples: int
    labels: int  # tokens that count as one
    padding: int  # tokens that belong to no conversation
    unreadable: tuple[Unreadable, ...]  # the first of those that were left out


class _Unit(NamedTuple):
    """What stays together: a conversation, or both answers of a pair."""

    record: ChatRecord
    conversations: list[Conversation]
    text_bytes: int

    @property
    def tokens(self) -> int:
        return sum(len(each.tokens) for each in self.conversations)


def prepare_chat(
    files: Sequence[Path],
    encoder: ChatEncoder,
    out: Path,
    options: ChatOptions,
    progress: Callable[[int], None] = lambda records: None,
) -> PreparedChat:
    """Write the conversations, or pairs, of JSON lines as packed samples into ``out``."""
    digest = hashlib.sha256(encoder.tokenizer_text.encode()).hexdigest()
    layout = SampleLayout(masked=True, packed=options.sequence, pairs=options.pairs)
    out.mkdir(parents=True, exist_ok=True)
    with (
        alone_in(out),
        ShardWriter(
            out,
            encoder.vocab,
            encoder.end_token,
            digest,
            options.file_bytes,
            options.replace,
            layout=layout,
        ) as writer,
    ):
        _copy_tokenizer(encoder, out)
        samples = _ChatSamples(writer, encoder.end_token, options)
        left_out: list[Unreadable] = []
        records = read_records(files, options.messages_key, pairs=options.pairs)
        for unit in _units(records, encoder, progress):
            if isinstance(unit, Unreadable):
                left_out.append(unit)
            elif reason := _unfit(unit, options.sequence):
                left_out.append(Unreadable(unit.record.file, unit.record.line, reason))
            else:
                samples.add(unit)
        samples.finish()
        _list_left_out(files, left_out, samples.units, out, options)
        origin = CorpusOrigin(options.inputs, len(files), samples.text_bytes, 0, len(left_out))
        manifest = writer.finish(origin)
    return PreparedChat(
        manifest=manifest,
        samples=samples.samples,
        labels=samples.labels,
        padding=samples.padding,
        unreadable=tuple(left_out[:MOST_NAMED]),
    )


class _ChatSamples:
    """Packs units into samples and writes these."""

    def __init__(self, writer: ShardWriter, padding_token: int, options: ChatOptions) -> None:
        self._writer, self._token, self._sequence = writer, padding_token, options.sequence
        self._packer = BestFit[_Unit](options.sequence, alone=not options.pack)
        self.samples = self.units = self.labels = self.padding = self.text_bytes = 0

    def add(self, unit: _Unit) -> None:
        self.units += 1
        self.text_bytes += unit.text_bytes
        for sample in self._packer.add(unit, unit.tokens):
            self._write(sample)

    def finish(self) -> None:
        for sample in self._packer.finish():
            self._write(sample)

    def _write(self, sample: list[_Unit]) -> None:
        """One sample. All of its documents have one hash: it is held out as a whole."""
        parts = [each for unit in sample for each in unit.conversations]
        lengths = [len(each.tokens) for each in parts]
        tokens = np.full(self._sequence, self._token, np.uint32)
        tokens[: sum(lengths)] = np.concatenate([each.tokens for each in parts])
        labels = np.zeros(self._sequence, np.bool_)
        labels[: sum(lengths)] = np.concatenate([each.labels for each in parts])
        starts = np.cumsum([0, *lengths[:-1]])
        self._writer.append(tokens, starts, [document_hash(tokens.tobytes())] * len(starts), labels)
        self.samples += 1
        self.labels += int(labels.sum())
        self.padding += self._sequence - sum(lengths)


def _units(
    records: Iterable[Record], encoder: ChatEncoder, progress: Callable[[int], None]
) -> Iterator[_Unit | Unreadable]:
    """What each record becomes, in their order; encoded in batches."""
    waiting = iter(records)
    while batch := list(islice(waiting, _ENCODED_AT_ONCE)):
        texts = [
            each if isinstance(each, Unreadable) else _rendered(each, encoder) for each in batch
        ]
        flat = [text for found in texts if isinstance(found, list) for text in found]
        encoded = iter(encoder.encode(flat))
        for record, found in zip(batch, texts, strict=True):
            if isinstance(record, Unreadable):
                yield record
            elif isinstance(found, Unreadable):
                yield found
            else:
                text_bytes = sum(len(text.text.encode()) for text in found)
                yield _Unit(record, [next(encoded) for _ in found], text_bytes)
        progress(len(batch))


def _rendered(record: ChatRecord, encoder: ChatEncoder) -> list[Rendered] | Unreadable:
    """The texts of a record; of a pair, only what follows the shared messages is an answer."""
    try:
        texts = [encoder.render(each, record.tools) for each in record.conversations]
        if not record.shared:
            return texts
        shared = encoder.template.render(
            record.conversations[0][: record.shared], record.tools
        ).text
    except (TemplateError, NotAppended, TypeError, ValueError) as error:
        reason = f"the template cannot render it: {error}"
        return Unreadable(record.file, record.line, reason)
    if not all(each.text.startswith(shared) for each in texts):
        reason = "the template writes the prompt otherwise once an answer follows"
        return Unreadable(record.file, record.line, reason)
    return [
        Rendered(each.text, [span for span in each.spans if span[0] >= len(shared)])
        for each in texts
    ]


def _unfit(unit: _Unit, sequence: int) -> str:
    """Why a unit is left out; "" where it is not."""
    if not all(each.labels.any() for each in unit.conversations):
        return "the assistant says nothing in it: no token would be a label"
    if unit.tokens > sequence:
        what = "both answers with their prompts have" if len(unit.conversations) > 1 else "has"
        return f"{what} {unit.tokens:,} tokens, more than a sample of {sequence:,}"
    return ""


def _copy_tokenizer(encoder: ChatEncoder, out: Path) -> None:
    """The tokenizer with its template stays with the corpus: an exported model needs both."""
    write_atomically(out / TOKENIZER_NAME, encoder.tokenizer_text.encode())
    write_atomically(out / CONFIG_NAME, (encoder.folder / CONFIG_NAME).read_bytes())
    write_atomically(out / TEMPLATE_NAME, encoder.template.text.encode())


def _list_left_out(
    files: Sequence[Path], left_out: list[Unreadable], units: int, out: Path, options: ChatOptions
) -> None:
    """Record which lines are left out and why; refuse where they are too many, or all."""
    listing = out / UNREADABLE_NAME
    listing.unlink(missing_ok=True)
    if not left_out:
        if not units:
            rule = "holds no conversation"
            raise DataError("input", files[0], rule, "give files with a conversation a line")
        return
    lines = [
        {"file": str(files[each.file]), "line": each.line, "reason": each.reason}
        for each in left_out[:MOST_NAMED]
    ]
    write_atomically(listing, msgspec.json.Encoder().encode_lines(lines))
    count, records, first = len(left_out), units + len(left_out), left_out[0]
    few = count <= FEW_UNREADABLE and 2 * count <= records
    if count > options.most_unreadable * records and not few:
        rule = (
            f"{count:,} of {records:,} records would be left out, more than --most-unreadable "
            f"allows; the first: {first.reason} (all: {listing})"
        )
        where = f"{files[first.file]}:{first.line}"
        fix = "correct them, raise --sequence where they are too long, or allow more"
        raise DataError("input", where, rule, fix)
