"""From a token of a corpus back to the document that it came from: file, record, offset, id."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from phalanx.config import Data
from phalanx.data.corpus.manifest import CorpusManifest, read_manifest
from phalanx.data.corpus.opening import open_stream
from phalanx.data.errors import DataError
from phalanx.data.prepare.output.places import IDS_NAME, PLACE, SourceFile
from phalanx.data.reader import SampleReader

TRACE_FOLDER = "trace"
FILES_NAME = "files.json"
DOCUMENTS_NAME = "documents.bin"  # a PLACE for each document, in the order of the corpus


class TracedDocument(msgspec.Struct, frozen=True):
    """A document of a corpus, and where it came from."""

    document: int  # number within the corpus
    token: int  # its first one
    file: str
    content: str  # SHA-256 of that file, or an object's ETag
    record: int  # line, row or record, from 1; 0: the whole file
    offset: int  # byte of the unpacked file; of Parquet, the row
    id: str


class CorpusTrace:
    """The map of a corpus that ``phalanx data prepare`` made."""

    def __init__(self, corpus: Path) -> None:
        self.manifest: CorpusManifest = read_manifest(corpus)
        folder = corpus / TRACE_FOLDER
        try:
            content = (folder / FILES_NAME).read_bytes()
            self._ids = folder / IDS_NAME
            self._places: NDArray[Any] = np.memmap(folder / DOCUMENTS_NAME, PLACE, "r")
        except (OSError, ValueError):
            rule = "has no map back to its sources"
            raise DataError("corpus", corpus, rule, "make it with `phalanx data prepare`") from None
        self._files = msgspec.json.decode(content, type=list[SourceFile])
        if len(self._places) != self.manifest.documents:
            rule = (
                f"its map has {len(self._places):,} documents, it has {self.manifest.documents:,}"
            )
            raise DataError("corpus", corpus, rule, "make it again with `phalanx data prepare`")

    def document(self, number: int) -> TracedDocument:
        """One document by its number."""
        place = self._places[number]
        file = self._files[int(place["file"])]
        id_start = int(self._places[number - 1]["id_end"]) if number else 0
        with self._ids.open("rb") as ids:
            ids.seek(id_start)
            name = ids.read(int(place["id_end"]) - id_start).decode()
        where = (int(place["record"]), int(place["offset"]), name)
        return TracedDocument(
            number, int(place["token"]), file.path, file.sha256 or file.etag, *where
        )

    def of_tokens(self, first: int, count: int = 1) -> list[TracedDocument]:
        """The documents of consecutive tokens of the corpus."""
        if not 0 <= first < self.manifest.tokens:
            rule = f"the corpus has {self.manifest.tokens:,} tokens"
            raise DataError("token", first, rule, f"use 0 to {self.manifest.tokens - 1}")
        starts = _TokenColumn(self._places)
        low = bisect_right(starts, first) - 1
        high = bisect_right(starts, first + count - 1)
        return [self.document(number) for number in range(low, high)]

    def of_shard(self, shard: str, token: int) -> TracedDocument:
        """The document of a token that is given by its shard and its position there."""
        names = [file.name for file in self.manifest.files]
        if shard not in names:
            raise DataError("shard", shard, f"the corpus has {len(names)}", f"e.g. {names[0]}")
        return self.of_tokens(names.index(shard) * self.manifest.file_tokens + token)[0]


class _TokenColumn:
    """First tokens of documents; a lookup reads a few of them, not all."""

    def __init__(self, places: NDArray[Any]) -> None:
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> int:
        return int(self._places[number]["token"])


def trace_sample(data: Data, vocab: int, sample: int) -> list[TracedDocument]:
    """Documents of one sample of a run: what the model saw, and where that came from."""
    reader = SampleReader(data, vocab)
    which, indices = reader.locate(np.array([sample], np.int64))
    name = list(reader.sources)[int(which[0])]
    path = data.blend[name].path if data.blend else data.path
    if not path or "://" in path:
        rule = "only a corpus of token shards on this machine can be traced"
        raise DataError("data.path", path, rule, "bring it here with `phalanx data stage`")
    trace = CorpusTrace(Path(path))
    stream = open_stream(path, vocab, data.validation_fraction, "train")
    first = int(indices[0]) * data.sequence
    starts = stream.document_starts(first + 1, data.sequence - 1).tolist()
    places = [stream.place(token) for token in (first, *starts)]
    return [trace.of_shard(Path(place.file).name, place.token) for place in places]
