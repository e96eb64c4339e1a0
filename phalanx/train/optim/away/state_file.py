"""A rank's file on a node's drive: read and written in parallel past the page cache, and mapped.

The mapping is how checkpoints read and fill it; the optimizer goes past it. Both see the same bytes
as long as one has finished before the other begins, which is tried out when the file is opened.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from phalanx.config import ConfigError

PAGE = 4096  # what reads and writes past the page cache are aligned to
THREADS = 4  # of each direction
SPARE_BYTES = 1 << 30  # of the drive that stays free
_DIRECT = getattr(os, "O_DIRECT", 0)

log = logging.getLogger(__name__)


class StateFile:
    """Has no name: its room is free again when the process is gone, whatever ended it."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, paged(max(size, 2 * PAGE))
        self._descriptor = self._open()
        self.map = mmap.mmap(self._descriptor, self.size)
        self.direct = self._past_cache()
        self._readers = ThreadPoolExecutor(THREADS, thread_name_prefix="state-reader")
        self._writers = ThreadPoolExecutor(THREADS, thread_name_prefix="state-writer")
        # The mapping has a descriptor of its own, and lives as long as tensors in it.
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, buffer: memoryview, offset: int) -> Future[None]:
        """Fill whole pages of memory from the file."""
        return self._readers.submit(_move, os.preadv, self._descriptor, buffer, offset, self.folder)

    def write(
        self, buffer: memoryview, offset: int, after: torch.cuda.Event | None = None
    ) -> Future[None]:
        """Write whole pages, ``after`` a device filled them."""

        def write() -> None:
            if after is not None:
                after.synchronize()
            _move(os.pwritev, self._descriptor, buffer, offset, self.folder)

        return self._writers.submit(write)

    def flush(self) -> None:
        """What was written through the mapping is in the file when this returns."""
        self.map.flush()

    def _open(self) -> int:
        """A new file with all of its room reserved, or ``ConfigError`` with the numbers."""
        free = self._free()
        try:
            if self.size > free - SPARE_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            descriptor, name = tempfile.mkstemp(prefix=".phalanx-state-", dir=self.folder)
            Path(name).unlink()
            try:
                os.posix_fallocate(descriptor, 0, self.size)
            except OSError:
                os.close(descriptor)
                raise
        except OSError as error:
            raise self._refused(error, free) from error
        return descriptor

    def _free(self) -> int:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return shutil.disk_usage(self.folder).free
        except OSError as error:
            raise self._refused(error, 0) from error

    def _refused(self, error: OSError, free: int) -> ConfigError:
        key, folder = "memory.offload_folder", f'"{self.folder}"'
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            fix = "set it to a folder on a drive of this node that you may write"
            return ConfigError(key, folder, f"cannot be used: {error.strerror}", fix)
        left = max(0, free - SPARE_BYTES) / 1e9
        rule = (
            f"a rank's optimizer state needs {self.size / 1e9:.1f} GB there, {left:.1f} GB are left"
        )
        fix = 'set optimizer.state = "int8", use a larger drive, or more ranks on more nodes'
        return ConfigError(key, folder, rule, fix)

    def _past_cache(self) -> bool:
        """Whether the file is used past the page cache from here on."""
        try:
            direct = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDWR | _DIRECT)
        except OSError:
            direct = -1
        if _DIRECT and direct >= 0 and self._agrees(direct):
            os.close(self._descriptor)
            self._descriptor = direct
            return True
        if direct >= 0:
            os.close(direct)
        log.warning(
            "%s takes no reads and writes past the page cache (a RAM disk?): "
            "optimizer state there also fills host memory",
            self.folder,
        )
        return False

    def _agrees(self, direct: int) -> bool:
        """Whether both ways see what the other one wrote; leaves zeros."""
        page = memoryview(mmap.mmap(-1, PAGE))
        try:
            for value in (0xA5, 0x3C):
                self.map[:PAGE] = bytes([value]) * PAGE
                self.map.flush(0, PAGE)
                if os.preadv(direct, [page], 0) != PAGE or bytes(page) != self.map[:PAGE]:
                    return False
                page[:] = bytes([value ^ 0xFF]) * PAGE
                if os.pwritev(direct, [page], 0) != PAGE or bytes(page) != self.map[:PAGE]:
                    return False
        except OSError:
            return False
        finally:
            self.map[:PAGE] = bytes(PAGE)
            self.map.flush(0, PAGE)
        return True


def _move(
    move: Callable[[int, list[memoryview], int], int],
    descriptor: int,
    buffer: memoryview,
    offset: int,
    folder: Path,
) -> None:
    """All of a buffer, in as many calls as it takes."""
    assert len(buffer) % PAGE == 0 and offset % PAGE == 0
    done = 0
    while done < len(buffer):
        number, problem = errno.EIO, "no byte was moved"
        try:
            count = move(descriptor, [buffer[done:]], offset + done)
        except OSError as error:
            count, number, problem = 0, error.errno or errno.EIO, error.strerror or str(error)
        if count <= 0:
            verb = "read" if move is os.preadv else "written"
            where = f"optimizer state in {folder} cannot be {verb} at byte {offset + done:,}"
            raise OSError(number, f"{where}: {problem}")
        done += count


def paged(size: int) -> int:
    """Bytes of whole pages that hold so many."""
    return -(-size // PAGE) * PAGE
