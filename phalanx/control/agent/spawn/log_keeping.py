"""Keeps workers' logs within bounds, however much they write, and drops old ones.

A worker's output goes straight into its file, at any speed. A file that has grown too large keeps
its end: what was dropped before it is counted, and told to whoever reads it. Logs of jobs that
ended are compressed, and dropped by age and by size.
"""

from __future__ import annotations

import ctypes
import gzip
import os
import shutil
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from phalanx.control.agent.safe_files import FOLDER, create_at, open_at, open_regular, read_regular
from phalanx.control.agent.spawn.log_times import marks_path

MOST_BYTES = 64 << 20  # of one file
KEPT_BYTES = 16 << 20  # of its end, when it is cut
PAGE = 64 << 10  # holes begin and end at whole blocks of any file system
COMPRESS_SECONDS = 600.0  # after the last word of a job that ended
KEEP_SECONDS = 14 * 86_400.0
KEEP_BYTES = 4 << 30  # of all logs of ended jobs on a node

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02  # linux/falloc.h
_libc = ctypes.CDLL(None, use_errno=True)


def cut(path: Path, most_bytes: int = MOST_BYTES, kept_bytes: int = KEPT_BYTES) -> int:
    """Drop the beginning of a log that is being written; returns how many bytes.

    Where the file system can, the beginning becomes a hole: it takes no room any more, and nothing
    that its writers add meanwhile is lost. Elsewhere the file is emptied and gets its end back.
    """
    file = open_regular(path, os.O_RDWR | os.O_APPEND)
    try:
        return cut_open(file, most_bytes, kept_bytes)
    finally:
        os.close(file)


def cut_open(file: int, most_bytes: int = MOST_BYTES, kept_bytes: int = KEPT_BYTES) -> int:
    """The same of a log that is open to be read and appended to."""
    size, first = os.fstat(file).st_size, beginning(file)
    if size - first <= most_bytes:
        return 0
    until = (size - kept_bytes) // PAGE * PAGE
    if until > first and _punch(file, until):
        return until - first
    return _empty(file, size, kept_bytes)


def beginning(file: int) -> int:
    """Where a log's kept part begins: behind the hole that a cut has left."""
    try:
        return os.lseek(file, 0, os.SEEK_DATA)
    except OSError:  # it is empty, or the file system knows no holes
        return 0


def dropped_note(count: int) -> bytes:
    """The line that stands for what was dropped."""
    return (
        f"... {count} bytes were dropped here: the log grew too large\n".encode() if count else b""
    )


def _punch(file: int, until: int) -> bool:
    """Give back the room of a file's first bytes; False where the file system cannot."""
    given: int = _libc.fallocate(
        ctypes.c_int(file),
        ctypes.c_int(_PUNCH_HOLE | _KEEP_SIZE),
        ctypes.c_int64(0),
        ctypes.c_int64(until),
    )
    return given == 0 and beginning(file) >= until


def _empty(file: int, size: int, kept_bytes: int) -> int:
    """Empty a file and append its end; what is added meanwhile may be lost, and is not counted."""
    end = os.pread(file, kept_bytes, size - kept_bytes)
    end = end[end.find(b"\n") + 1 :]
    os.ftruncate(file, 0)
    # Appended, like the writers' own words, so that neither overwrites the other.
    os.write(file, dropped_note(size - len(end)) + end)
    return size - len(end)


def note_ranks(folder: Path, ranks: Sequence[int]) -> None:
    """Remember whose logs lie in a job's folder, by worker: its processes are gone some day.

    The note lies beside the folder, which belongs to the job's user.
    """
    path = _note(folder)
    if ranks and tuple(ranks) != noted_ranks(folder):
        with suppress(OSError):  # a job does not fail for the label of its log
            draft = path.with_name(f"{path.name}.tmp")
            draft.write_text(" ".join(str(rank) for rank in ranks))
            draft.rename(path)


def noted_ranks(folder: Path) -> tuple[int, ...]:
    """The ranks that the workers of a job had here at last; (): nobody knows."""
    try:
        return tuple(int(word) for word in _note(folder).read_text().split())
    except (OSError, ValueError):
        return ()


def _note(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.ranks")


def owner_path(folder: Path) -> Path:
    """Where it is noted whose job's a folder is."""
    return folder.with_name(f"{folder.name}.owner")


def move_logs(folder: Path, aside: Path) -> None:
    """Move a job's folder, with the notes beside it."""
    for note in (_note, marks_path):
        with suppress(FileNotFoundError):
            note(folder).rename(note(aside))
    folder.rename(aside)


def compress_ended(jobs: Path, running: Collection[str], now: float | None = None) -> None:
    """Compress the logs of jobs that do not run here any more."""
    now = time.time() if now is None else now
    for path in jobs.glob("*/*.log"):
        with suppress(OSError):
            if path.parent.name in running:
                continue
            folder = os.open(path.parent, FOLDER)
            try:
                _compress_at(folder, path.name, now)
            finally:
                os.close(folder)


def _compress_at(folder: int, name: str, now: float) -> None:
    """One log; behind what was compressed before, where its job went on here after a while."""
    with os.fdopen(open_at(folder, name), "rb") as plain:
        status = os.fstat(plain.fileno())
        if now - status.st_mtime < COMPRESS_SECONDS:
            return
        if status.st_size:
            _pack(folder, name, plain, status)
    os.unlink(name, dir_fd=folder)


def _pack(folder: int, name: str, plain: IO[bytes], status: os.stat_result) -> None:
    whole, draft = f"{name}.gz", f"{name}.gz.tmp"
    with suppress(FileNotFoundError):
        os.unlink(draft, dir_fd=folder)
    # Nobody but the agent can change what it will unpack one day.
    with os.fdopen(create_at(folder, draft), "wb") as file:
        with suppress(FileNotFoundError), os.fdopen(open_at(folder, whole), "rb") as before:
            shutil.copyfileobj(before, file)
        first = max(beginning(plain.fileno()), status.st_size - MOST_BYTES)
        plain.seek(first)
        with gzip.open(file, "wb", compresslevel=3) as packed:
            packed.write(dropped_note(first))
            for _ in range(MOST_BYTES // PAGE):  # its owner may still add to it
                packed.write(plain.read(PAGE))
        os.utime(file.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
    os.rename(draft, whole, src_dir_fd=folder, dst_dir_fd=folder)


def expire(
    jobs: Path,
    running: Collection[str],
    *,
    keep_seconds: float = KEEP_SECONDS,
    keep_bytes: int = KEEP_BYTES,
    now: float | None = None,
) -> int:
    """Drop logs of ended jobs that are too old, then the oldest beyond the bytes; how many.

    With a job's last log goes all that it left on this node.
    """
    now = time.time() if now is None else now
    logs: list[tuple[float, int, Path]] = []
    for path in jobs.glob("*/*.log*"):
        with suppress(OSError):
            if path.parent.name not in running:
                status = path.lstat()
                used_bytes = min(status.st_size, status.st_blocks * 512)  # holes take none
                logs.append((status.st_mtime, used_bytes, path))
    size, dropped = sum(bytes_ for _, bytes_, _ in logs), 0
    for written, bytes_, path in sorted(logs):
        if now - written <= keep_seconds and size <= keep_bytes:
            break
        with suppress(OSError):
            path.unlink()
            dropped += 1
            size -= bytes_
            if not any(path.parent.glob("worker-*.log*")):
                _note(path.parent).unlink(missing_ok=True)
                marks_path(path.parent).unlink(missing_ok=True)
            if not any(path.parent.glob("*.log*")):
                shutil.rmtree(path.parent, ignore_errors=True)
                owner_path(path.parent).unlink(missing_ok=True)
    return dropped


def read_end(path: Path, tail_bytes: int, start: int = 0) -> tuple[bytes, int]:
    """The end of a compressed log, from a place on at most, and the place behind it."""
    kept = b""
    with read_regular(path) as file, gzip.open(file, "rb") as packed:
        packed.seek(start)
        while piece := packed.read(1 << 20):
            kept = (kept + piece)[-tail_bytes:] if tail_bytes else b""
        return kept, packed.tell()
