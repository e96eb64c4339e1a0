"""Writing a corpus of token shards; nothing has its final name before it is complete."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from phalanx.data.corpus.checksum import BlockSums, crc32c
from phalanx.data.corpus.index import ShardIndex, document_hash
from phalanx.data.corpus.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    CorpusManifest,
    CorpusOrigin,
    ShardFile,
    StoredTokens,
    token_type,
)
from phalanx.data.durable_files import write_atomically
from phalanx.data.errors import DataError

FILE_BYTES = 256 << 20  # default size of a shard
BLOCK_BYTES = 1 << 20  # of each checksum
HASHED_TOKENS = 4096  # the beginning of a document that its hash is made of


class SampleLayout(msgspec.Struct, frozen=True):
    """Of a corpus whose samples are made in advance: see ``CorpusManifest``."""

    masked: bool = False
    packed: int = 0
    pairs: bool = False
    packed_apart: float | None = None


class ShardWriter:
    """Writes a corpus document by document, or in runs of documents with ``append``."""

    def __init__(
        self,
        folder: Path,
        vocab: int,
        end_of_document: int,
        tokenizer: str = "",
        file_bytes: int = FILE_BYTES,
        replace: bool = False,
        finished: tuple[ShardFile, ...] = (),
        layout: SampleLayout | None = None,
    ) -> None:
        dtype = token_type(vocab)
        width = np.dtype(dtype).itemsize
        self.folder = folder
        self.files = list(finished)
        self._manifest = CorpusManifest(
            version=FORMAT_VERSION,
            dtype=dtype,
            vocab=vocab,
            end_of_document=end_of_document,
            tokenizer=tokenizer,
            source=CorpusOrigin(),
            tokens=0,
            documents=0,
            file_tokens=max(1, file_bytes // width),
            block_bytes=min(BLOCK_BYTES, max(1, file_bytes // width) * width),
            files=(),
            **msgspec.structs.asdict(layout or SampleLayout()),
        )
        self._open: _OpenShard | None = None
        self._in_document = False
        folder.mkdir(parents=True, exist_ok=True)
        _clear(folder, replace, keep={name for file in finished for name in file.names})

    @property
    def open_tokens(self) -> int:
        """Tokens in the shard that is not complete yet."""
        return self._open.tokens if self._open else 0

    @property
    def documents(self) -> int:
        """Documents so far."""
        return sum(file.documents for file in self.files) + (
            self._open.documents if self._open else 0
        )

    def append(
        self, tokens: ArrayLike, starts: ArrayLike, hashes: ArrayLike, labels: ArrayLike = ()
    ) -> None:
        """Add tokens, in which documents with these hashes start at these positions.

        ``labels`` says of each whether it counts as one, in a corpus that is masked.
        """
        rest, counted = self._stored(tokens), np.asarray(labels, np.bool_)
        assert len(counted) == (len(rest) if self._manifest.masked else 0)
        at, numbers = np.asarray(starts, np.int64), np.asarray(hashes, np.uint32)
        while len(rest):
            if self._open is None:
                self._open = _OpenShard(self.folder, len(self.files), self._manifest.block_bytes)
            left = self._manifest.file_tokens - self._open.tokens
            here = int(np.searchsorted(at, left))
            self._open.append(rest[:left], at[:here], numbers[:here], counted[:left])
            rest, at, numbers = rest[left:], at[here:] - left, numbers[here:]
            counted = counted[left:]
            if self._open.tokens == self._manifest.file_tokens:
                self._close_shard()

    def write(self, tokens: ArrayLike) -> None:
        """Add tokens to the current document, or start one with them."""
        content = np.asarray(tokens)
        if len(content) == 0:
            return
        if self._in_document:
            self.append(content, [], [])
        else:
            beginning = self._stored(content[:HASHED_TOKENS]).astype("<u4")
            self.append(content, [0], [document_hash(beginning.tobytes())])
        self._in_document = True

    def end_document(self) -> None:
        """Close the current document with the end-of-document token."""
        self.write([self._manifest.end_of_document])
        self._in_document = False

    def finish(self, source: CorpusOrigin | None = None) -> CorpusManifest:
        """Complete the corpus: the last shard, then the manifest."""
        self._close_shard()
        manifest = msgspec.structs.replace(
            self._manifest,
            source=source or CorpusOrigin(),
            tokens=sum(file.tokens for file in self.files),
            documents=sum(file.documents for file in self.files),
            files=tuple(self.files),
        )
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        write_atomically(self.folder / MANIFEST_NAME, text + b"\n")
        return manifest

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._open is not None:  # left early: an unfinished shard must not linger
            self._open.discard()
            self._open = None

    def _stored(self, tokens: ArrayLike) -> StoredTokens:
        content = np.asarray(tokens)
        vocab = self._manifest.vocab
        if len(content) and not (int(content.min()) >= 0 and int(content.max()) < vocab):
            outside = content[(content < 0) | (content >= vocab)][0]
            rule = f"is outside the vocabulary of {vocab}"
            raise DataError("token", int(outside), rule, "use the tokenizer of that vocabulary")
        return content.astype(self._manifest.stored_type, copy=False)

    def _close_shard(self) -> None:
        if self._open is not None:
            self.files.append(self._open.commit())
            self._open = None


class _OpenShard:
    """A shard under its temporary name."""

    def __init__(self, folder: Path, number: int, block_bytes: int) -> None:
        self._path = folder / f"shard-{number:05d}.bin"
        self._temporary = self._path.with_suffix(".bin.tmp")
        self._file = self._temporary.open("wb")
        self._block_bytes = block_bytes
        self._sums = BlockSums(block_bytes)
        self._starts: list[NDArray[Any]] = []
        self._hashes: list[NDArray[Any]] = []
        self._labels: list[NDArray[Any]] = []
        self.tokens = self.documents = 0

    def append(
        self,
        tokens: StoredTokens,
        starts: NDArray[np.int64],
        hashes: NDArray[np.uint32],
        labels: NDArray[np.bool_],
    ) -> None:
        data = np.ascontiguousarray(tokens).view(np.uint8)
        self._file.write(data.data)
        self._sums.add(data)
        self._starts.append(starts + self.tokens)
        self._hashes.append(hashes)
        self._labels.append(runs_of(labels) + self.tokens)
        self.tokens += len(tokens)
        self.documents += len(starts)

    def commit(self) -> ShardFile:
        sums = self._sums.finish()
        starts, hashes = np.concatenate(self._starts), np.concatenate(self._hashes)
        labels = np.concatenate(self._labels)
        found = ShardIndex(self.tokens, self._block_bytes, sums, starts, hashes, labels)
        index = found.encode()
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        counts = (self.tokens, len(starts))
        file = ShardFile(self._path.name, *counts, crc32c(index), len(labels))
        self._temporary.replace(self._path)
        write_atomically(self._path.with_name(file.index_name), index)
        return file

    def discard(self) -> None:
        with suppress(OSError):  # writing what is buffered may fail for want of space
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def runs_of(labels: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Where runs of true values begin, and the first position past each: [runs, 2]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], labels, [False]]).astype(np.int8)))
    return edges.reshape(-1, 2)


def beside(home: Path, name: str) -> Path:
    """Where something is recorded about a corpus: in its folder, or next to its only file."""
    return home / name if home.is_dir() else home.with_name(f"{home.name}.{name}")


def _clear(folder: Path, replace: bool, keep: set[str]) -> None:
    """Make room for a new corpus; the manifest goes first, so no half-old corpus is ever read."""
    manifest = folder / MANIFEST_NAME
    if manifest.exists() and not replace:
        rule = "already holds a corpus"
        raise DataError("out", folder, rule, "choose another folder, or replace it with --force")
    manifest.unlink(missing_ok=True)
    for old in folder.glob("shard-*"):
        if old.name not in keep:
            old.unlink()
