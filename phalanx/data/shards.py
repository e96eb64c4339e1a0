"""Token shards: plain files of little-endian tokens beside one manifest.

The files together are one stream of tokens; a sample may cross from one file into the next.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from phalanx.data.documents import number_documents
from phalanx.data.errors import DataError
from phalanx.data.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    REDO_FIX,
    CorpusManifest,
    ShardFile,
    StoredTokens,
    read_manifest,
    token_type,
)

FILE_BYTES = 256 << 20  # default size of a shard
_READ_BYTES = 4 << 20


class ShardSource:
    """A corpus of token shards, memory-mapped, cut into samples that share their edge token."""

    def __init__(self, folder: str | Path, sequence: int, vocab: int) -> None:
        self._folder = Path(folder)
        self.manifest = read_manifest(self._folder)
        if self.manifest.vocab > vocab:
            raise DataError(
                "model.vocab",
                vocab,
                f"the corpus at {folder} was made with a vocabulary of {self.manifest.vocab}",
                f"set model.vocab to {self.manifest.vocab} or more",
            )
        if self.manifest.tokens < sequence + 1:
            raise DataError(
                "data.sequence",
                sequence,
                f"one sample needs {sequence + 1} tokens, and the corpus at {folder} has "
                f"{self.manifest.tokens}",
                f"set data.sequence to {max(1, self.manifest.tokens - 1)} or less",
            )
        self.vocab = self.manifest.vocab
        # The label of a sample's last position is the first token of the next sample.
        self.samples = (self.manifest.tokens - 1) // sequence
        self.fingerprint = self.manifest.fingerprint
        self._sequence = sequence
        sizes = [file.tokens for file in self.manifest.files]
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._maps: dict[int, StoredTokens] = {}

    def read(self, index: int) -> NDArray[np.int64]:
        """Tokens of one sample: [sequence + 1]."""
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} is outside the corpus' {self.samples}")
        tokens = self.slice(index * self._sequence, self._sequence + 1)
        if int(tokens.max()) >= self.vocab:
            number = self._file_of(index * self._sequence)
            raise DataError(
                "data.path",
                self._folder / self.manifest.files[number].name,
                f"sample {index} holds token {tokens.max()}, outside the vocabulary of "
                f"{self.vocab}",
                "the file is damaged: find out with `phalanx data inspect --verify`",
            )
        return tokens

    def slice(self, first: int, count: int) -> NDArray[np.int64]:
        """``count`` tokens of the stream from token ``first`` on, across files."""
        tokens = np.empty(count, np.int64)
        filled = 0
        number = self._file_of(first)
        while filled < count:
            start = first + filled - int(self._starts[number])
            piece = self._map(number)[start : start + count - filled]
            tokens[filled : filled + len(piece)] = piece
            filled += len(piece)
            number += 1
        return tokens

    def documents(self, tokens: NDArray[np.int64]) -> NDArray[np.int32]:
        """Document number of each position, counted from 0 along the last dim."""
        return number_documents(tokens, self.manifest.end_of_document)

    def _file_of(self, token: int) -> int:
        return int(np.searchsorted(self._starts, token, side="right")) - 1

    def _map(self, number: int) -> StoredTokens:
        if number not in self._maps:
            # Mapped on first use: opening a corpus of thousands of files stays cheap.
            path = self._folder / self.manifest.files[number].name
            self._maps[number] = np.memmap(path, dtype=self.manifest.stored_type, mode="r")
        return self._maps[number]


class ShardWriter:
    """Writes a corpus document by document; nothing has its final name before it is complete."""

    def __init__(
        self,
        folder: Path,
        vocab: int,
        end_of_document: int,
        tokenizer: str = "",
        file_bytes: int = FILE_BYTES,
        replace: bool = False,
    ) -> None:
        self._folder = folder
        self._manifest = CorpusManifest(
            version=FORMAT_VERSION,
            dtype=token_type(vocab),
            vocab=vocab,
            end_of_document=end_of_document,
            tokenizer=tokenizer,
            tokens=0,
            documents=0,
            files=(),
        )
        self._file_tokens = max(1, file_bytes // self._manifest.stored_type.itemsize)
        self._files: list[ShardFile] = []
        self._documents = 0
        self._open: _OpenShard | None = None
        folder.mkdir(parents=True, exist_ok=True)
        _clear(folder, replace)

    def write(self, tokens: ArrayLike) -> None:
        """Append tokens to the current document."""
        tokens = np.asarray(tokens, dtype=np.int64)
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._manifest.vocab:
            raise DataError(
                "tokens",
                int(tokens.max() if tokens.min() >= 0 else tokens.min()),
                f"lies outside the vocabulary of {self._manifest.vocab}",
                "give the writer the vocabulary size of the tokenizer in use",
            )
        while tokens.size:
            if self._open is None:
                self._open = _OpenShard(self._folder, len(self._files))
            room = self._file_tokens - self._open.tokens
            self._open.append(tokens[:room].astype(self._manifest.stored_type))
            tokens = tokens[room:]
            if self._open.tokens == self._file_tokens:
                self._close_shard()

    def end_document(self) -> None:
        """Close the current document with the end-of-document token."""
        self.write([self._manifest.end_of_document])
        self._documents += 1

    def finish(self) -> CorpusManifest:
        """Complete the corpus: the last shard, then the manifest."""
        self._close_shard()
        manifest = msgspec.structs.replace(
            self._manifest,
            tokens=sum(file.tokens for file in self._files),
            documents=self._documents,
            files=tuple(self._files),
        )
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        write_atomically(self._folder / MANIFEST_NAME, text + b"\n")
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

    def _close_shard(self) -> None:
        if self._open is not None:
            self._files.append(self._open.commit())
            self._open = None


class _OpenShard:
    """A shard under its temporary name."""

    def __init__(self, folder: Path, number: int) -> None:
        self._path = folder / f"shard-{number:05d}.bin"
        self._temporary = self._path.with_suffix(".bin.tmp")
        self._file = self._temporary.open("wb")
        self._crc32 = 0
        self._bytes = 0
        self.tokens = 0

    def append(self, tokens: StoredTokens) -> None:
        data = tokens.tobytes()
        self._file.write(data)
        self._crc32 = zlib.crc32(data, self._crc32)
        self._bytes += len(data)
        self.tokens += len(tokens)

    def commit(self) -> ShardFile:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._temporary.replace(self._path)
        return ShardFile(self._path.name, self.tokens, self._bytes, self._crc32)

    def discard(self) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Give ``path`` this content, entirely or not at all, even through a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes this and all earlier renames in the folder durable
    finally:
        os.close(folder)


def verify(folder: Path) -> CorpusManifest:
    """Read every file and compare its checksum with the manifest's."""
    manifest = read_manifest(folder)
    for file in manifest.files:
        found = 0
        with (folder / file.name).open("rb") as stream:
            while data := stream.read(_READ_BYTES):
                found = zlib.crc32(data, found)
        if found != file.crc32:
            rule = f"is damaged: checksum {found:08x}, where the manifest says {file.crc32:08x}"
            raise DataError("data.path", folder / file.name, rule, REDO_FIX)
    return manifest


def _clear(folder: Path, replace: bool) -> None:
    """Make room for a new corpus; the manifest goes first, so no half-old corpus is ever read."""
    manifest = folder / MANIFEST_NAME
    if manifest.exists() and not replace:
        rule = "already holds a corpus"
        raise DataError("out", folder, rule, "choose another folder, or replace it with --force")
    manifest.unlink(missing_ok=True)
    for old in folder.glob("shard-*.bin*"):
        old.unlink()
