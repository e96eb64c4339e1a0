"""Copying a corpus to node-local disk: proved on the way, complete or not there, at a set rate."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from phalanx.data.checksum import BlockSums
from phalanx.data.errors import DataError
from phalanx.data.foreign import ForeignStream
from phalanx.data.manifest import MANIFEST_NAME, REDO_FIX, TOKENIZER_NAME
from phalanx.data.opening import open_whole
from phalanx.data.shards import ShardStream
from phalanx.data.stream import FileStream

_PIECE_BYTES = 1 << 20


class Staged(msgspec.Struct, frozen=True):
    """Outcome of ``stage``."""

    target: str
    copied_bytes: int  # by this call: 0 where the corpus was there already
    kept_bytes: int  # copied by a call that was interrupted, and found good
    seconds: float


def stage(
    source: Path,
    target: Path,
    bytes_per_second: float = 0.0,
    replace: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Staged:
    """Copy the corpus at ``source`` into a folder that appears complete or not at all.

    Callers for the same target take turns, and all but the first find the work done. What an
    interrupted call has copied is kept. A rate of 0 is no limit.
    """
    began = time.monotonic()
    stream = open_whole(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target.with_name(f".{target.name}.lock")):
        if target.exists():
            if _holds(target, stream):
                return Staged(str(target), 0, 0, time.monotonic() - began)
            if not replace:
                rule = "holds something else than the corpus to be staged"
                fix = "choose another folder, or replace it with --force"
                raise DataError("target", target, rule, fix)
        partial = target.with_name(f".{target.name}.staging")
        partial.mkdir(exist_ok=True)
        base, names = _files_of(stream)
        total = _refuse_lack_of_space(base, names, partial)
        copier = _Copier(bytes_per_second, lambda done: progress(done, total))
        proofs = _Proofs(stream)
        for name in names:
            copier.copy(base / name, partial / name, proofs.of(name))
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
        _sync(target.parent)
    return Staged(str(target), copier.copied, copier.kept, time.monotonic() - began)


class _Proof(NamedTuple):
    """Checksums that the blocks of a file must have."""

    block_bytes: int
    sums: NDArray[np.uint32]


class _Copier:
    """Copies files one after the other, on average never faster than allowed."""

    def __init__(self, bytes_per_second: float, progress: Callable[[int], None]) -> None:
        self.copied = self.kept = 0
        self._rate = bytes_per_second
        self._progress = progress
        self._began = time.monotonic()

    def copy(self, source: Path, target: Path, proof: _Proof | None) -> None:
        """Copy a file and prove what was read; a copy that is there and good is kept."""
        stat = source.stat()
        if target.exists() and self._good(target, stat, proof):
            self.kept += stat.st_size
            self._progress(self.copied + self.kept)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(target.name + ".tmp")
        with source.open("rb") as reader, temporary.open("wb") as writer:
            _refuse_damage(source, proof, self._passed_on(reader, writer))
            writer.flush()
            os.fsync(writer.fileno())
        os.utime(temporary, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        temporary.rename(target)
        _sync(target.parent)

    def _good(self, target: Path, stat: os.stat_result, proof: _Proof | None) -> bool:
        found = target.stat()
        if found.st_size != stat.st_size or proof is None:
            return (found.st_size, found.st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
        try:
            with target.open("rb") as reader:
                _refuse_damage(target, proof, iter(lambda: reader.read(_PIECE_BYTES), b""))
        except DataError:
            return False
        return True

    def _passed_on(self, reader: IO[bytes], writer: IO[bytes]) -> Iterator[bytes]:
        while data := reader.read(_PIECE_BYTES):
            writer.write(data)
            yield data
            self.copied += len(data)
            self._progress(self.copied + self.kept)
            if self._rate:
                ahead = self.copied / self._rate - (time.monotonic() - self._began)
                time.sleep(max(0.0, ahead))


def _refuse_damage(path: Path, proof: _Proof | None, content: Iterator[bytes]) -> None:
    """Read ``content`` to its end and compare its blocks, where there are checksums."""
    sums = BlockSums(proof.block_bytes if proof else _PIECE_BYTES)
    for data in content:
        if proof:
            sums.add(np.frombuffer(data, np.uint8))
    if proof is None:
        return
    found = sums.finish()
    if len(found) != len(proof.sums):
        raise DataError("source", path, "is truncated", REDO_FIX)
    for block in np.flatnonzero(found != proof.sums)[:1]:
        raise DataError("source", path, f"block {block} is damaged: wrong checksum", REDO_FIX)


class _Proofs:
    """The checksums that a corpus has of its own files; none in other programs' formats."""

    def __init__(self, stream: FileStream) -> None:
        self._stream = stream
        files = stream.manifest.files if isinstance(stream, ShardStream) else ()
        self._numbers = {name: at for at, file in enumerate(files) for name in file.names}

    def of(self, name: Path) -> _Proof | None:
        """What a file must be, or None where nothing is known."""
        number = self._numbers.get(str(name))
        if number is None:
            return None
        assert isinstance(self._stream, ShardStream)
        file = self._stream.manifest.files[number]
        if str(name) == file.name:
            index = self._stream.index(number, proved=True)
            return _Proof(index.block_bytes, index.sums)
        size = (self._stream.home / name).stat().st_size
        return _Proof(size, np.array([file.index_crc32c], np.uint32))


def _files_of(stream: FileStream) -> tuple[Path, list[Path]]:
    """The folder of a corpus and the names of all its files in it; a manifest comes last."""
    home = stream.home
    if isinstance(stream, ShardStream):
        names = [Path(name) for file in stream.manifest.files for name in file.names]
        names += [path.relative_to(home) for path in sorted(home.glob("*.heldout"))]
        others = [TOKENIZER_NAME, MANIFEST_NAME]
        return home, [*names, *(Path(name) for name in others if (home / name).exists())]
    assert isinstance(stream, ForeignStream)
    base = home if home.is_dir() else home.parent
    pattern = "*.heldout" if home.is_dir() else f"{home.name}.*.heldout"
    paths = [*stream.paths, *sorted(base.glob(pattern))]
    return base, [path.relative_to(base) for path in paths]


def _holds(target: Path, stream: FileStream) -> bool:
    try:
        return open_whole(target).fingerprint == stream.fingerprint
    except DataError:
        return False


def _refuse_lack_of_space(base: Path, names: list[Path], partial: Path) -> int:
    needed = sum((base / name).stat().st_size for name in names)
    there = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
    free = shutil.disk_usage(partial).free
    if needed - there > free:
        rule = f"has {free:,} bytes free, and the corpus needs {needed - there:,}"
        raise DataError("target", partial.parent, rule, "make room, or choose another disk")
    return needed


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process of this node at a time; the lock ends with the process that holds it."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
