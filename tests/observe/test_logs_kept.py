"""Logs stay within bounds at any speed, say what they lost, and go when they are old."""

from __future__ import annotations

import gzip
import os
import threading
import time
from pathlib import Path

from phalanx.control.log_keeping import compress_ended, cut, expire, read_end


def log_of(root: Path, job: str, text: bytes, age: float = 0.0) -> Path:
    path = root / job / "worker-0.log"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text)
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_a_log_that_grew_too_large_keeps_its_end_and_says_what_it_lost(tmp_path: Path) -> None:
    lines = [b"line %06d\n" % number for number in range(10_000)]
    path = log_of(tmp_path, "1", b"".join(lines))
    dropped = cut(path, most_bytes=50_000, kept_bytes=10_000)
    text = path.read_bytes()
    first, rest = text.split(b"\n", 1)
    assert str(dropped).encode() in first
    assert rest == b"".join(lines)[-len(rest) :]
    assert dropped + len(rest) == sum(map(len, lines))
    assert cut(path, most_bytes=50_000) == 0


def test_a_flood_stays_bounded_while_it_is_written(tmp_path: Path) -> None:
    path = log_of(tmp_path, "1", b"")
    stop = threading.Event()
    written = [0]

    def flood() -> None:
        with path.open("ab", buffering=0) as file:
            line = b"x" * 99 + b"\n"
            while not stop.is_set():
                written[0] += file.write(line * 1000)

    writer = threading.Thread(target=flood)
    writer.start()
    largest, dropped = 0, 0
    deadline = time.monotonic() + 20
    while written[0] < 50_000_000 and time.monotonic() < deadline:
        dropped += cut(path, most_bytes=1_000_000, kept_bytes=100_000)
        largest = max(largest, path.stat().st_size)
    stop.set()
    writer.join()
    assert dropped > 0
    assert largest < written[0] / 2
    cut(path, most_bytes=1_000_000, kept_bytes=100_000)
    assert path.stat().st_size < 1_200_000


def test_logs_of_ended_jobs_are_compressed_and_still_read(tmp_path: Path) -> None:
    text = b"hello\n" * 1000
    ended, running = log_of(tmp_path, "1", text, 3600), log_of(tmp_path, "2", text, 3600)
    fresh = log_of(tmp_path, "3", text)
    compress_ended(tmp_path, ["2"])
    assert not ended.exists()
    assert gzip.decompress((tmp_path / "1" / "worker-0.log.gz").read_bytes()) == text
    assert read_end(tmp_path / "1" / "worker-0.log.gz", 12) == b"hello\nhello\n"
    assert running.exists()
    assert fresh.exists()


def test_old_logs_go_by_age_and_by_size_but_never_those_of_running_jobs(tmp_path: Path) -> None:
    old = log_of(tmp_path, "1", b"x" * 10, 1000)
    running = log_of(tmp_path, "2", b"x" * 10, 1000)
    large = log_of(tmp_path, "3", b"x" * 1000, 50)
    new = log_of(tmp_path, "4", b"x" * 10, 10)
    assert expire(tmp_path, ["2"], keep_seconds=500, keep_bytes=500) == 2
    assert not old.parent.exists()
    assert not large.exists()
    assert running.exists()
    assert new.exists()
