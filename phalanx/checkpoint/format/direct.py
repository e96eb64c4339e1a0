"""Large aligned writes past the page cache, checksums on the way, and the reads that prove them."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from phalanx.data.corpus.checksum import crc32c

ALIGN_BYTES = 4096
CHUNK_BYTES = 1 << 20  # of a shard, each with its own checksum
WRITE_BYTES = 4 << 20  # handed to the kernel at a time; a multiple of CHUNK_BYTES
WRITERS = 3  # threads of one file; less leaves the disk waiting while checksums are computed

_DIRECT = getattr(os, "O_DIRECT", 0)


def aligned(size: int) -> int:
    """``size`` rounded up to what direct writes need."""
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def aligned_buffer(size: int) -> memoryview:
    """Private memory that starts and ends on a page."""
    return memoryview(mmap.mmap(-1, aligned(max(size, 1))))


class WriteRate:
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


def write_file(path: Path, size: int, buffers: Iterable[memoryview], pace: WriteRate) -> bytes:
    """Write a new file durably; returns the checksums of its chunks.

    ``buffers`` are page-aligned and, but for the last, of WRITE_BYTES; the last is padded. A buffer
    is used no longer when WRITERS more have been asked for.
    """
    descriptor = _open_new(path)
    try:
        _reserve(descriptor, size)
        sums = _write_parallel(descriptor, size, buffers, pace)
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return np.array(sums, "<u4").tobytes()


def _write_parallel(
    descriptor: int, size: int, buffers: Iterable[memoryview], pace: WriteRate
) -> list[int]:
    sums: list[int] = []
    running: deque[Future[list[int]]] = deque()

    def write(buffer: memoryview, offset: int) -> list[int]:
        real = min(len(buffer), size - offset)
        found = chunk_sums(buffer[:real])
        _write_all(descriptor, buffer[: aligned(real)], offset)
        return found

    with ThreadPoolExecutor(WRITERS) as pool:
        for offset, buffer in zip(range(0, size, WRITE_BYTES), buffers, strict=True):
            pace.wait(len(buffer))
            running.append(pool.submit(write, buffer, offset))
            if len(running) == WRITERS:
                sums += running.popleft().result()
        for future in running:
            sums += future.result()
    return sums


def _reserve(descriptor: int, size: int) -> None:
    """Have the blocks before the bytes: writes run side by side, and a full disk shows at once."""
    try:
        os.posix_fallocate(descriptor, 0, max(1, aligned(size)))
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def chunk_sums(data: memoryview) -> list[int]:
    """The checksum of every chunk of a view that starts on a chunk."""
    return [crc32c(data[i : i + CHUNK_BYTES]) for i in range(0, len(data), CHUNK_BYTES)]


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
