"""Documents held out for validation, chosen by their hash.

A document is held out when its hash falls below the wanted fraction, whatever else the corpus
holds: one that grows keeps every earlier document on its side. Which tokens these are is worked
out from the index of the shards, or recorded once in a file beside the corpus.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.data.corpus.checksum import crc32c
from phalanx.data.corpus.index import HASH_SPAN
from phalanx.data.corpus.mapped import map_bytes
from phalanx.data.corpus.stream import FileStream, Split, TokenPosition
from phalanx.data.corpus.writer import beside
from phalanx.data.durable_files import write_atomically
from phalanx.data.errors import DataError

MOST_DOCUMENTS = 4_000_000  # that are looked through each time a corpus is opened

_RUNS_IN_LISTS = 1 << 17
_HEADER = struct.Struct("<8sI4x16sdQQQ")  # magic, version, corpus, fraction, runs, documents, crc
_MAGIC = b"PHXHELD\x00"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The held-out part of a stream, as runs of neighbouring documents."""

    starts: NDArray[np.int64]  # [runs] first token
    lengths: NDArray[np.int64]  # [runs] tokens
    documents: int


class CutStream:
    """A stream without its held-out documents, or these alone, packed without gaps."""

    def __init__(self, whole: FileStream, held_out: HeldOut, fraction: float, split: Split) -> None:
        self._whole = whole
        if split == "validation":
            firsts, lengths = held_out.starts, held_out.lengths
            self.documents = held_out.documents
        else:
            firsts = np.concatenate([[0], held_out.starts + held_out.lengths])
            lengths = np.concatenate([held_out.starts, [whole.tokens]]) - firsts
            self.documents = whole.documents - held_out.documents
        kept = lengths > 0
        packed = np.concatenate([[0], np.cumsum(lengths[kept])])
        # Lists are searched and indexed several times as fast, arrays are a fifth of their size.
        few = len(packed) <= _RUNS_IN_LISTS
        self._firsts: Any = firsts[kept].tolist() if few else firsts[kept]
        self._packed: Any = packed.tolist() if few else packed
        self.tokens = int(self._packed[-1])
        self.vocab = whole.vocab
        self.end_of_document = whole.end_of_document
        self.tokenizer = whole.tokenizer
        self.block_tokens = whole.block_tokens
        self.masked = whole.masked
        self.fingerprint = f"{whole.fingerprint}-{split}-{fraction!r}"

    def read_tokens(self, first: int, count: int, out: NDArray[Any]) -> None:
        """Fill ``out`` with ``count`` tokens of the stream from token ``first`` on."""
        filled = 0
        for begin, length, _ in self._runs(first, count):
            self._whole.read_tokens(begin, length, out[filled : filled + length])
            filled += length

    def read_rows(self, firsts: Sequence[int], rows: Iterable[NDArray[Any]]) -> None:
        """Fill each row with the tokens of the stream from its first one on."""
        for first, row in zip(firsts, rows, strict=True):
            self.read_tokens(first, len(row), row)

    def read_mask(self, first: int, count: int, out: NDArray[Any]) -> None:
        """Fill ``out`` with 1 for each token that counts as a label, else 0."""
        filled = 0
        for begin, length, _ in self._runs(first, count):
            self._whole.read_mask(begin, length, out[filled : filled + length])
            filled += length

    def document_starts(self, first: int, count: int) -> NDArray[np.int64]:
        """Ascending positions in [first, first + count) at which documents start."""
        parts = [
            self._whole.document_starts(begin, length) + shift
            for begin, length, shift in self._runs(first, count)
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def place(self, token: int) -> TokenPosition:
        """Where a token of the stream is stored."""
        return self._whole.place(self._runs(token, 1)[0][0])

    def check(self, first: int, count: int) -> None:
        """Compare the checksums of all blocks that hold these tokens, naming a bad one."""
        for begin, length, _ in self._runs(first, count):
            self._whole.check(begin, length)

    def _runs(self, first: int, count: int) -> list[tuple[int, int, int]]:
        """Ranges (first, count) of the whole stream, with what takes them to this one's."""
        if not 0 <= first <= first + count <= self.tokens:
            raise IndexError(f"tokens [{first}, {first + count}) of a stream of {self.tokens}")
        runs = []
        at, run = first, bisect_right(self._packed, first) - 1
        while at < first + count:
            begin, packed = int(self._firsts[run]), int(self._packed[run])
            length = min(first + count, int(self._packed[run + 1])) - at
            runs.append((begin + at - packed, length, packed - begin))
            at += length
            run += 1
        return runs


def choose_held_out(
    stream: FileStream, fraction: float, progress: Callable[[int], None] = lambda tokens: None
) -> HeldOut:
    """Look through the hashes of all documents; ``progress`` receives tokens passed."""
    threshold = round(fraction * HASH_SPAN)
    starts: list[NDArray[np.int64]] = []
    ends: list[NDArray[np.int64]] = []
    edges = stream.file_starts
    unended = 0  # 1 while the last held-out document may go on in the next file
    for number in range(len(edges) - 1):
        inside = np.asarray(stream.file_documents(number)[:], np.int64) + edges[number]
        chosen = np.flatnonzero(stream.file_hashes(number) < threshold)
        if unended and len(inside):
            ends.append(inside[:1])
            unended = 0
        starts.append(inside[chosen])
        ends.append(inside[chosen[chosen + 1 < len(inside)] + 1])
        unended = unended or int(len(chosen) > 0 and chosen[-1] + 1 == len(inside))
        progress(edges[number + 1] - edges[number])
    first = np.concatenate(starts) if starts else np.empty(0, np.int64)
    past = np.concatenate([*ends, np.full(unended, stream.tokens)]) if ends else first
    return _joined(first, past.astype(np.int64))


def _joined(first: NDArray[np.int64], past: NDArray[np.int64]) -> HeldOut:
    """Neighbouring documents as one run."""
    documents = len(first)
    begins = np.ones(documents, bool)
    begins[1:] = first[1:] != past[:-1]
    last = np.append(begins[1:], True) if documents else begins
    return HeldOut(first[begins], past[last] - first[begins], documents)


def record_path(home: Path, fraction: float) -> Path:
    """Where the held-out documents of a corpus are recorded."""
    return beside(home, f"{fraction!r}.heldout")


def record_held_out(stream: FileStream, fraction: float, held_out: HeldOut) -> Path:
    """Write the held-out documents beside the corpus."""
    path = record_path(stream.home, fraction)
    body = np.asarray([held_out.starts, held_out.lengths], "<i8").tobytes()
    identity = stream.fingerprint.encode()
    counts = (len(held_out.starts), held_out.documents, crc32c(body))
    write_atomically(path, _HEADER.pack(_MAGIC, _VERSION, identity, fraction, *counts) + body)
    return path


def load_held_out(stream: FileStream, fraction: float) -> HeldOut | None:
    """The recorded held-out documents, or None; a record of another corpus is refused."""
    path = record_path(stream.home, fraction)
    if not path.exists():
        return None

    def refuse(rule: str) -> DataError:
        fix = f"make it again with `phalanx data split {stream.home} --fraction {fraction!r}`"
        return DataError("data.path", path, rule, fix)

    data = map_bytes(path)
    if len(data) < _HEADER.size:
        raise refuse("is truncated")
    magic, version, corpus, _, runs, documents, checksum = _HEADER.unpack_from(data.data)
    body = data[_HEADER.size :]
    if magic != _MAGIC or version != _VERSION or len(body) != 16 * runs:
        raise refuse("is no record of held-out documents, or truncated")
    if corpus.decode() != stream.fingerprint:
        raise refuse("was made for another state of the corpus")
    if crc32c(body.data) != checksum:
        raise refuse("is damaged: wrong checksum")
    starts, lengths = body.view("<i8").reshape(2, runs)
    return HeldOut(starts, lengths, documents)


def cut(stream: FileStream, fraction: float, split: Split, own_hashes: bool) -> CutStream:
    """One side of a stream; ``own_hashes``: its index holds them, so that looking is cheap."""
    held_out = load_held_out(stream, fraction)
    if held_out is None:
        if not own_hashes or stream.documents > MOST_DOCUMENTS:
            raise DataError(
                "data.validation_fraction",
                fraction,
                f"which documents of {stream.home} are held out has not been recorded",
                f"record it once with `phalanx data split {stream.home} --fraction {fraction!r}`",
            )
        held_out = choose_held_out(stream, fraction)
    return CutStream(stream, held_out, fraction, split)
