"""A ring of frames in a file: a worker appends, its agent reads, and neither waits for the other.

The writer overwrites what nobody has read; the reader counts what it missed. A frame is length,
checksum, body; the header's position moves only behind a whole frame, so that a writer killed half
way leaves nothing half said. The reader never maps the file: a worker that cuts it off does it no
harm.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from contextlib import suppress
from mmap import mmap
from pathlib import Path
from threading import Lock
from typing import NamedTuple

MAGIC = b"PHXRING1"
CAPACITY_BYTES = 1 << 20  # of frames: about 2,000 records
MOST_CAPACITY_BYTES = 4 << 20  # that a reader believes
SEARCHED_BYTES = 256 << 20  # that a reader looks through for the oldest frame

_HEADER = struct.Struct("<8sQQQ")  # magic, capacity, position written, position read
_FRAME = struct.Struct("<II")
_POSITION = struct.Struct("<Q")
_WRITTEN_AT, _READ_AT = 16, 24
HEADER_BYTES = 64


class RingWriter:
    """The worker's end. Opening one that exists goes on behind what it holds.

    OSError where there is no room for all of it: a write into a mapped page that the file system
    has no room for would kill the worker.
    """

    def __init__(self, path: Path, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self.capacity_bytes = capacity_bytes
        self._appending = Lock()
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            whole = os.fstat(file).st_size == HEADER_BYTES + capacity_bytes
            os.ftruncate(file, HEADER_BYTES + capacity_bytes)
            os.posix_fallocate(file, 0, HEADER_BYTES + capacity_bytes)
            self._map = mmap(file, HEADER_BYTES + capacity_bytes)
        finally:
            os.close(file)
        magic, capacity, self._at, _ = _HEADER.unpack_from(self._map)
        if not whole or magic != MAGIC or capacity != capacity_bytes:
            self._at = 0
            _HEADER.pack_into(self._map, 0, MAGIC, capacity_bytes, 0, 0)

    def append(self, body: bytes) -> bool:
        """Append a frame; False when it is larger than the ring can hold."""
        frame = _FRAME.pack(len(body), zlib.crc32(body)) + body
        if len(frame) > self.capacity_bytes:
            return False
        with self._appending:
            self._write(frame)
        return True

    def _write(self, frame: bytes) -> None:
        start = self._at % self.capacity_bytes
        first = min(len(frame), self.capacity_bytes - start)
        self._map[HEADER_BYTES + start : HEADER_BYTES + start + first] = frame[:first]
        if first < len(frame):
            self._map[HEADER_BYTES : HEADER_BYTES + len(frame) - first] = frame[first:]
        self._at += len(frame)
        _POSITION.pack_into(self._map, _WRITTEN_AT, self._at)

    def close(self) -> None:
        """Append no more; what is in the file stays."""
        self._map.close()


class RingRead(NamedTuple):
    """What a look at a ring gave."""

    bodies: list[bytes]
    lost_bytes: int  # overwritten before they were read, or damaged


class RingReader:
    """The agent's end. Its place is kept in the file, for the agent that comes after it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._at: int | None = None

    def read(self) -> RingRead:
        """Frames since the last call: never more than the ring holds, however fast it is filled."""
        try:
            if self._file < 0:
                self._file = _open(self._path, os.O_RDWR)
            return self._read()
        except FileNotFoundError:
            return RingRead([], 0)
        except (OSError, ValueError):
            self.close()
            return RingRead([], 0)

    def history(self) -> list[bytes]:
        """All frames that the ring still holds, also those that were read; its place stays."""
        try:
            file = _open(self._path, os.O_RDONLY)
        except OSError:
            return []
        try:
            return _history(file)
        except (OSError, ValueError):
            return []
        finally:
            os.close(file)

    def close(self) -> None:
        """Read no more."""
        if self._file >= 0:
            with suppress(OSError):
                os.close(self._file)
            self._file = -1

    def _read(self) -> RingRead:
        capacity, written, kept = _header(self._file)
        at = kept if self._at is None else self._at
        if at > written:
            at = 0  # the ring was made anew
        if written - at > capacity:
            self._settle(written)
            return RingRead([], written - at)
        data = _between(self._file, at, written - at, capacity)
        _, now, _ = _header(self._file)
        if now - at > capacity:  # overtaken while reading: what we hold is a mixture
            self._settle(now)
            return RingRead([], now - at)
        bodies, whole_bytes = _frames(data)
        self._settle(written)  # nothing behind a damaged frame can be told apart
        return RingRead(bodies, len(data) - whole_bytes)

    def _settle(self, at: int) -> None:
        self._at = at
        os.pwrite(self._file, _POSITION.pack(at), _READ_AT)


def _open(path: Path, flags: int) -> int:
    """The ring of a worker, whose folder it lies in: no link to another's file, and no pipe."""
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != path.parent.lstat().st_uid:
        os.close(file)
        raise PermissionError(f"{path} is not its worker's")
    return file


def _header(file: int) -> tuple[int, int, int]:
    """Capacity, and the places up to which the ring is written and read."""
    magic, capacity, written, kept = _HEADER.unpack(_pread(file, _HEADER.size, 0))
    if magic != MAGIC or not 0 < capacity <= MOST_CAPACITY_BYTES:
        raise ValueError("not a ring")
    return capacity, written, kept


def _between(file: int, at: int, size: int, capacity: int) -> bytes:
    start = at % capacity
    first = min(size, capacity - start)
    return _pread(file, first, HEADER_BYTES + start) + _pread(file, size - first, HEADER_BYTES)


def _pread(file: int, size: int, at: int) -> bytes:
    data = os.pread(file, size, at) if size else b""
    if len(data) < size:
        raise ValueError("the ring was cut off")
    return data


def _history(file: int) -> list[bytes]:
    capacity, written, _ = _header(file)
    oldest = max(0, written - capacity)
    data = _between(file, oldest, written - oldest, capacity)
    _, now, _ = _header(file)
    start = max(0, now - capacity - oldest)  # overwritten while we read
    # Where the oldest whole frame begins is not written anywhere: it is the first place from
    # which frame follows frame up to the end.
    budget = SEARCHED_BYTES
    for at in range(start, len(data) - _FRAME.size):
        length, checksum = _FRAME.unpack_from(data, at)
        first = at + _FRAME.size
        if not 0 < length <= len(data) - first:
            continue
        budget -= length
        if budget < 0:  # no worker of ours writes so: it is made to keep us busy
            return []
        if zlib.crc32(data[first : first + length]) == checksum:
            bodies, whole_bytes = _frames(data[at:])
            budget -= len(data) - at
            if whole_bytes == len(data) - at:
                return bodies
    return []


def _frames(data: bytes) -> tuple[list[bytes], int]:
    """Frames up to the first damaged one, and how many bytes they take."""
    bodies: list[bytes] = []
    at = 0
    while at + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, at)
        end = at + _FRAME.size + length
        body = data[at + _FRAME.size : end]
        if end > len(data) or zlib.crc32(body) != checksum:
            break
        bodies.append(body)
        at = end
    return bodies, at
