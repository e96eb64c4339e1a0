"""A corpus of documents as samples of whole ones, made in advance by best fit.

Every token of a document but its first is the label of one position, and sees all of its piece of
the document before it. Only documents longer than a sample are cut: each piece begins with the last
token of the piece before. What comes out follows from the corpus and the options alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from phalanx.data.corpus.index import HASH_SPAN
from phalanx.data.corpus.manifest import TOKENIZER_NAME, CorpusManifest, CorpusOrigin
from phalanx.data.corpus.stream import FileStream
from phalanx.data.corpus.writer import FILE_BYTES, SampleLayout, ShardWriter
from phalanx.data.durable_files import write_atomically
from phalanx.data.errors import DataError
from phalanx.data.folder_lock import alone_in
from phalanx.data.pack.best_fit import BestFit

OPEN_SAMPLES = 8192  # positions alone are held of them


class PackOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How documents become samples."""

    sequence: int  # tokens of a sample, as data.sequence of the job
    validation_fraction: float = (
        0.0  # documents held out by jobs, which share no sample with others
    )
    file_bytes: int = FILE_BYTES
    replace: bool = False


class PackedDocuments(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of ``pack_documents``."""

    manifest: CorpusManifest
    documents: int
    cut: int  # of them, those that are longer than a sample
    samples: int
    labels: int
    padding: int  # tokens that belong to no document


class StoredDocument(NamedTuple):
    """Where a document lies in its stream."""

    first: int
    tokens: int
    hash: int


class Piece(NamedTuple):
    """What of a document is in one sample."""

    first: int
    tokens: int
    hash: int  # of the document


def pack_documents(
    stream: FileStream,
    out: Path,
    options: PackOptions,
    progress: Callable[[int], None] = lambda tokens: None,
) -> PackedDocuments:
    """Write the documents of a corpus as packed samples into ``out``."""
    if stream.masked:
        rule = "holds samples that were packed already"
        raise DataError("path", stream.home, rule, "give a corpus of `phalanx data tokenize`")
    layout = SampleLayout(
        masked=True, packed=options.sequence, packed_apart=options.validation_fraction
    )
    out.mkdir(parents=True, exist_ok=True)
    with (
        alone_in(out),
        ShardWriter(
            out,
            stream.vocab,
            stream.end_of_document or 0,
            stream.tokenizer,
            options.file_bytes,
            options.replace,
            layout=layout,
        ) as writer,
    ):
        if (tokenizer := stream.home / TOKENIZER_NAME).is_file():
            write_atomically(out / TOKENIZER_NAME, tokenizer.read_bytes())
        samples = _DocumentSamples(stream, writer, options)
        for document in documents_of(stream):
            samples.add(document)
            progress(document.tokens)
        samples.finish()
        if not samples.written:
            rule = "has no document of two tokens: nothing to learn from"
            raise DataError("path", stream.home, rule, "give another corpus")
        manifest = writer.finish(CorpusOrigin((str(stream.home),)))
    return PackedDocuments(
        manifest=manifest,
        documents=samples.documents,
        cut=samples.cut,
        samples=samples.written,
        labels=samples.labels,
        padding=samples.padding,
    )


def documents_of(stream: FileStream) -> Iterator[StoredDocument]:
    """Every document in order; checksums are compared before a file is read, where it has any."""
    first, number = 0, 0  # of the document whose end is not known yet
    files = stream.file_starts
    for file in range(len(files) - 1):
        if stream.checksums:
            stream.check_index(file)
            stream.check(files[file], files[file + 1] - files[file])
        starts = np.asarray(stream.file_documents(file), np.int64) + files[file]
        hashes = np.asarray(stream.file_hashes(file), np.int64)
        for start, found in zip(starts.tolist(), hashes.tolist(), strict=True):
            if start > first:
                yield StoredDocument(first, start - first, number)
            first, number = start, found
    if stream.tokens > first:
        yield StoredDocument(first, stream.tokens - first, number)


def pieces_of(document: StoredDocument, sequence: int) -> Iterator[Piece]:
    """A document in as few samples as hold it; one of a single token has nothing to predict."""
    first, left = document.first, document.tokens
    while left > sequence:
        yield Piece(first, sequence, document.hash)
        first, left = first + sequence - 1, left - sequence + 1
    if left > 1:
        yield Piece(first, left, document.hash)


class _DocumentSamples:
    """Packs pieces into samples and writes these."""

    def __init__(self, stream: FileStream, writer: ShardWriter, options: PackOptions) -> None:
        self._stream, self._writer, self._sequence = stream, writer, options.sequence
        self._held_out = options.validation_fraction * HASH_SPAN
        # Documents that jobs hold out share samples with their like only.
        self._packers = [
            BestFit[Piece](options.sequence, most_open=OPEN_SAMPLES) for _ in ("train", "held out")
        ]
        self.documents = self.cut = self.written = self.labels = self.padding = 0

    def add(self, document: StoredDocument) -> None:
        self.documents += 1
        self.cut += document.tokens > self._sequence
        packer = self._packers[document.hash < self._held_out]
        for piece in pieces_of(document, self._sequence):
            for sample in packer.add(piece, piece.tokens):
                self._write(sample)

    def finish(self) -> None:
        for packer in self._packers:
            for sample in packer.finish():
                self._write(sample)

    def _write(self, sample: list[Piece]) -> None:
        """One sample; the hash of its first document decides whether it is held out."""
        tokens = np.full(self._sequence, self._stream.end_of_document or 0, np.uint32)
        labels = np.zeros(self._sequence, np.bool_)
        starts, at = [], 0
        for piece in sample:
            past = at + piece.tokens
            self._stream.read_tokens(piece.first, piece.tokens, tokens[at:past])
            labels[at + 1 : past] = True  # the first one follows no token of its document here
            starts.append(at)
            at = past
        self._writer.append(tokens, starts, [sample[0].hash] * len(starts), labels)
        self.written += 1
        self.labels += int(labels.sum())
        self.padding += self._sequence - at
