"""Copying a corpus to node-local disk: proved on the way, complete or not there, at a set rate."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from phalanx.config import Store
from phalanx.data.corpus.checksum import BlockSums
from phalanx.data.corpus.manifest import REDO_FIX
from phalanx.data.corpus.opening import open_whole
from phalanx.data.corpus.stream import FileStream
from phalanx.data.durable_files import sync_folder
from phalanx.data.errors import DataError
from phalanx.data.remote.origins import PIECE_BYTES, OriginFiles, Proof, origin_of


class Staged(msgspec.Struct, frozen=True):
    """Outcome of ``stage``."""

    target: str
    copied_bytes: int  # by this call: 0 where the corpus was there already
    kept_bytes: int  # copied by a call that was interrupted, and found good
    seconds: float


def stage(
    source: str | Path,
    target: Path,
    bytes_per_second: float = 0.0,
    replace: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    store: Store | None = None,
) -> Staged:
    """Copy the corpus at a path or URL into a folder that appears complete or not at all.

    Callers for the same target take turns, and all but the first find the work done. What an
    interrupted call has copied is kept. A rate of 0 is no limit.
    """
    began = time.monotonic()
    stream = open_whole(source, store=store)
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
        origin = origin_of(stream, partial)
        total = _refuse_lack_of_space(origin, partial)
        copier = _Copier(bytes_per_second, lambda done: progress(done, total))
        for name in origin.names:
            copier.copy(origin, name, partial / name)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
        sync_folder(target.parent)
    return Staged(str(target), copier.copied, copier.kept, time.monotonic() - began)


class _Copier:
    """Copies files one after the other, on average never faster than allowed."""

    def __init__(self, bytes_per_second: float, progress: Callable[[int], None]) -> None:
        self.copied = self.kept = 0
        self._rate = bytes_per_second
        self._progress = progress
        self._began = time.monotonic()

    def copy(self, origin: OriginFiles, name: Path, target: Path) -> None:
        """Copy a file and prove what was read; a copy that is there and good is kept."""
        proof, changed_ns = origin.proof(name), origin.changed_ns(name)
        if target.exists() and self._good(target, origin.size(name), changed_ns, proof):
            self.kept += target.stat().st_size
            self._progress(self.copied + self.kept)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(target.name + ".tmp")
        with temporary.open("wb") as writer:
            _refuse_damage(origin.shown(name), proof, self._passed_on(origin.pieces(name), writer))
            writer.flush()
            os.fsync(writer.fileno())
        if changed_ns:
            os.utime(temporary, ns=(changed_ns, changed_ns))
        temporary.rename(target)
        sync_folder(target.parent)

    def _good(self, target: Path, size: int, changed_ns: int, proof: Proof | None) -> bool:
        found = target.stat()
        if found.st_size != size or proof is None:
            return (found.st_size, found.st_mtime_ns) == (size, changed_ns)
        try:
            with target.open("rb") as reader:
                _refuse_damage(target, proof, iter(lambda: reader.read(PIECE_BYTES), b""))
        except DataError:
            return False
        return True

    def _passed_on(self, pieces: Iterator[memoryview], writer: IO[bytes]) -> Iterator[memoryview]:
        for data in pieces:
            writer.write(data)
            yield data
            self.copied += len(data)
            self._progress(self.copied + self.kept)
            if self._rate:
                ahead = self.copied / self._rate - (time.monotonic() - self._began)
                time.sleep(max(0.0, ahead))


def _refuse_damage(
    path: str | Path, proof: Proof | None, content: Iterator[bytes] | Iterator[memoryview]
) -> None:
    """Read ``content`` to its end and compare its blocks, where there are checksums."""
    sums = BlockSums(proof.block_bytes if proof else PIECE_BYTES)
    for data in content:
        if proof:
            sums.add(np.frombuffer(data, np.uint8))
    if proof is None:
        return
    actual_sums = sums.finish()
    if len(actual_sums) != len(proof.sums):
        raise DataError("source", path, "is truncated", REDO_FIX)
    for block in np.flatnonzero(actual_sums != proof.sums)[:1]:
        raise DataError("source", path, f"block {block} is damaged: wrong checksum", REDO_FIX)


def _holds(target: Path, stream: FileStream) -> bool:
    try:
        return open_whole(target).fingerprint == stream.fingerprint
    except DataError:
        return False


def _refuse_lack_of_space(origin: OriginFiles, partial: Path) -> int:
    needed = sum(origin.size(name) for name in origin.names)
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
