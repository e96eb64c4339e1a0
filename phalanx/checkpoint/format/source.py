"""Where the bytes of a checkpoint come from: a folder, or what speaks the same few words."""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Protocol

import msgspec

from phalanx.checkpoint.format.direct import aligned
from phalanx.checkpoint.format.geometry import RankGroup, TensorTable, digest_of
from phalanx.checkpoint.format.manifest import (
    BadCheckpointError,
    Manifest,
    read_manifest,
    shard_name,
    sidecar_name,
    table_name,
)
from phalanx.checkpoint.format.shard import Sidecar
from phalanx.data.corpus.checksum import crc32c


class ShardReader(Protocol):
    """One rank's shard, open for reading by several threads."""

    bytes: int

    def read(self, buffer: memoryview, offset: int) -> int:
        """Fill a buffer, which starts its memory, from ``offset`` as far as the shard goes."""

    def close(self) -> None: ...


class CheckpointSource(Protocol):
    """A checkpoint to load from. What it cannot give raises OSError, what is wrong is refused."""

    @property
    def where(self) -> Path | str: ...

    @property
    def manifest(self) -> Manifest: ...

    def table(self, group: RankGroup) -> TensorTable:
        """What the ranks of a group hold."""

    def sidecar(self, rank: int) -> Sidecar:
        """The proved word of a rank about its shard."""

    def open_shard(self, rank: int, direct: bool) -> ShardReader:
        """A rank's shard; ``direct``: nobody else on this node reads the same bytes."""


def rng_of(source: CheckpointSource, rank: int) -> bytes:
    """The random generators of a rank of the run; empty where they are not known."""
    manifest = source.manifest
    if not manifest.ranks:
        return source.sidecar(rank).rng
    # Dealt out to the shards like cards, so that no rank reads those of many others.
    place, shard = divmod(rank, manifest.world_size)
    dealt = source.sidecar(shard).generators
    return dealt[place] if place < len(dealt) else b""


class NamedSource(ABC):
    """A source that has files, or objects, with the names that a save gives them."""

    where: Path | str
    manifest: Manifest

    @abstractmethod
    def read_small(self, name: str) -> bytes:
        """A whole small file; OSError where that fails."""

    @abstractmethod
    def open_shard(self, rank: int, direct: bool) -> ShardReader:
        """A rank's shard."""

    def table(self, group: RankGroup) -> TensorTable:
        name = table_name(group.table, self.manifest.session)
        text = self._read(name)
        if digest_of(text) != group.table:
            raise BadCheckpointError(
                self.where, f"{name} is corrupt: its content does not match its name"
            )
        return msgspec.json.decode(text, type=TensorTable)

    def sidecar(self, rank: int) -> Sidecar:
        shard = self.manifest.shards[rank]
        name = sidecar_name(rank, self.manifest.session, shard)
        text = self._read(name)
        if crc32c(text) != shard.checksum:
            raise BadCheckpointError(self.where, f"{name} is corrupt: its checksum does not match")
        return msgspec.json.decode(text, type=Sidecar)

    def _read(self, name: str) -> bytes:
        try:
            return self.read_small(name)
        except OSError as error:
            problem = f"{name} cannot be read: {error.strerror or error}"
            raise BadCheckpointError(self.where, problem) from error


class FolderSource(NamedSource):
    """A checkpoint in a folder."""

    def __init__(self, path: Path) -> None:
        self.where = self._path = path
        self.manifest = read_manifest(path)

    def read_small(self, name: str) -> bytes:
        return (self._path / name).read_bytes()

    def open_shard(self, rank: int, direct: bool) -> ShardReader:
        return FileReader(self._path / shard_name(rank, self.manifest.session), direct)


class FileReader:
    """A shard in a file, past the page cache where that pays and works."""

    def __init__(self, path: Path, direct: bool) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC
        self._direct = direct and hasattr(os, "O_DIRECT")
        try:
            self._file = os.open(path, flags | (os.O_DIRECT if self._direct else 0))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct = False
            self._file = os.open(path, flags)
        self.bytes = os.fstat(self._file).st_size

    def read(self, buffer: memoryview, offset: int) -> int:
        done = 0
        while done < len(buffer):
            # Direct reads are of whole pages; only at the end of a file they come back shorter.
            target = buffer[done:]
            if self._direct and len(target) % 4096:
                target = memoryview(buffer.obj)[done : done + aligned(len(target))]
            count = os.preadv(self._file, [target], offset + done)
            done += count
            if count < len(target):
                break
        return min(done, len(buffer))

    def close(self) -> None:
        os.close(self._file)
