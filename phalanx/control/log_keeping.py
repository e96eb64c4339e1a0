"""Keeps workers' logs within bounds, however much they write, and drops old ones.

A worker's output goes straight into its file, at any speed. A file that has grown too large keeps
its end: what is cut out before it is counted in a line of its own. Logs of jobs that ended are
compressed, and dropped by age and by size.
"""

from __future__ import annotations

import gzip
import shutil
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

MOST_BYTES = 64 << 20  # of one file
KEPT_BYTES = 16 << 20  # of its end, when it is cut
COMPRESS_SECONDS = 600.0  # after the last word of a job that ended
KEEP_SECONDS = 14 * 86_400.0
KEEP_BYTES = 4 << 30  # of all logs of ended jobs on a node


def cut(path: Path, most_bytes: int = MOST_BYTES, kept_bytes: int = KEPT_BYTES) -> int:
    """Cut a log that is being written down to its end; returns the bytes that were dropped.

    Its writers append, so the file is emptied in place; what they add meanwhile may be lost too,
    which the next cut cannot know: the count is of what was there when it was cut.
    """
    size = path.stat().st_size
    if size <= most_bytes:
        return 0
    with path.open("rb+") as file:
        file.seek(size - kept_bytes)
        end = file.read(kept_bytes)
        end = end[end.find(b"\n") + 1 :]
        dropped = size - len(end)
        note = f"... {dropped} bytes were dropped here: the log grew beyond {most_bytes} bytes\n"
        file.truncate(0)
    # Appended, like the writers' own words, so that neither overwrites the other.
    with path.open("ab") as file:
        file.write(note.encode() + end)
    return dropped


def compress_ended(jobs: Path, running: Collection[str], now: float | None = None) -> None:
    """Compress the logs of jobs that do not run here any more."""
    now = time.time() if now is None else now
    for path in jobs.glob("*/*.log"):
        with suppress(OSError):
            if path.parent.name in running or now - path.stat().st_mtime < COMPRESS_SECONDS:
                continue
            if path.stat().st_size == 0:
                path.unlink()
                continue
            draft = path.with_name(f"{path.name}.gz.tmp")
            with path.open("rb") as plain, gzip.open(draft, "wb", compresslevel=3) as packed:
                shutil.copyfileobj(plain, packed)
            shutil.copystat(path, draft)
            draft.rename(path.with_name(f"{path.name}.gz"))
            path.unlink()


def expire(
    jobs: Path,
    running: Collection[str],
    *,
    keep_seconds: float = KEEP_SECONDS,
    keep_bytes: int = KEEP_BYTES,
    now: float | None = None,
) -> int:
    """Drop logs of ended jobs that are too old, then the oldest beyond the bytes; how many."""
    now = time.time() if now is None else now
    found: list[tuple[float, int, Path]] = []
    for path in jobs.glob("*/*.log*"):
        with suppress(OSError):
            if path.parent.name not in running:
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
    size, dropped = sum(bytes_ for _, bytes_, _ in found), 0
    for written, bytes_, path in sorted(found):
        if now - written <= keep_seconds and size <= keep_bytes:
            break
        with suppress(OSError):
            path.unlink()
            dropped += 1
            size -= bytes_
            if not any(path.parent.iterdir()):
                path.parent.rmdir()
    return dropped


def read_end(path: Path, tail_bytes: int) -> bytes:
    """The end of a compressed log."""
    kept = b""
    with gzip.open(path, "rb") as packed:
        while piece := packed.read(1 << 20):
            kept = (kept + piece)[-tail_bytes:] if tail_bytes else b""
    return kept
