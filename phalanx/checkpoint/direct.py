"""Large aligned writes past the page cache, checksums on the way, and the reads that prove them."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from phalanx.data.checksum import crc32c

ALIGN_BYTES = 4096
CHUNK_BYTES = 1 << 20  # of a shard, each with its own checksum
WRITE_BYTES = 16 << 20  # handed to the kernel at a time; a multiple of CHUNK_BYTES

_DIRECT = getattr(os, "O_DIRECT", 0)


def aligned(size: int) -> int:
    """``size`` rounded up to what direct writes need."""
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def aligned_buffer(size: int) -> memoryview:
    """Private memory that starts and ends on a page."""
    return memoryview(mmap.mmap(-1, aligned(max(size, 1))))


class Pace:
    """Holds writes back to a rate, so that a shared file system survives many writers."""

    def __init__(self, bytes_per_second: float = 0.0) -> None:
        self._rate = bytes_per_second
        self._due = time.monotonic()

    def wait(self, size: int) -> None:
        """Return when ``size`` more bytes may be written; at once without a rate."""
        if self._rate <= 0:
            return
        now = time.monotonic()
        self._due = max(self._due, now) + size / self._rate
        # The bytes of this very write are paid for by the next one.
        time.sleep(max(0.0, self._due - size / self._rate - now))


def write_file(path: Path, size: int, buffers: Iterable[memoryview], pace: Pace) -> bytes:
    """Write a new file durably; returns the checksums of its chunks.

    ``buffers`` are page-aligned and, but for the last, of WRITE_BYTES; the last is padded.
    """
    descriptor = _open_new(path)
    sums: list[int] = []
    try:
        offset = 0
        for buffer in buffers:
            real = min(len(buffer), size - offset)
            sums += chunk_sums(buffer[:real])
            pace.wait(real)
            _write_all(descriptor, buffer[: aligned(real)], offset)
            offset += real
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return np.array(sums, "<u4").tobytes()


def chunk_sums(data: memoryview) -> list[int]:
    """The checksum of every chunk of a view that starts on a chunk."""
    return [crc32c(data[i : i + CHUNK_BYTES]) for i in range(0, len(data), CHUNK_BYTES)]


def read_chunks(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill ``buffer`` from a file, as far as the file goes; the number of bytes read."""
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def write_synced(path: Path, content: bytes) -> None:
    """Write a small file and wait until it is on disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_new(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | _DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL or not _DIRECT:
            raise
        path.unlink(missing_ok=True)  # some file systems refuse only after they made the name
        return os.open(path, flags, 0o644)


def _write_all(descriptor: int, buffer: memoryview, offset: int) -> None:
    done = 0
    while done < len(buffer):
        try:
            done += os.pwrite(descriptor, buffer[done:], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not _is_direct(descriptor):
                raise
            # Refused here or by a short write before: the page cache takes any alignment.
            _leave_direct(descriptor)


def _is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & _DIRECT)


def _leave_direct(descriptor: int) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
