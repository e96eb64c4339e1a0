"""Logs stay within bounds at any speed, say what they lost, and go when they are old."""

from __future__ import annotations

import gzip
import os
import threading
import time
from pathlib import Path

import pytest

from phalanx.control.agent.spawn import log_keeping
from phalanx.control.agent.spawn.log_keeping import (
    beginning,
    compress_ended,
    cut,
    dropped_note,
    expire,
    note_ranks,
    noted_ranks,
    owner_path,
    read_end,
)


def log_of(root: Path, job: str, text: bytes, age: float = 0.0) -> Path:
    path = root / job / "worker-0.log"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text)
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def read_kept(path: Path) -> tuple[int, bytes]:
    """How many bytes were dropped, and what is left."""
    with path.open("rb") as file:
        first = beginning(file.fileno())
        file.seek(first)
        return first, file.read()


def room_of(path: Path) -> int:
    return path.stat().st_blocks * 512


@pytest.fixture
def holes(tmp_path: Path) -> None:
    """Only where the file system of temporary files knows holes, as nearly all do."""
    path = log_of(tmp_path, "0", b"x" * (1 << 20))
    if not cut(path, most_bytes=500_000, kept_bytes=100_000) or read_kept(path)[0] == 0:
        pytest.skip("no holes on this file system")


@pytest.mark.usefixtures("holes")
def test_a_log_that_grew_too_large_keeps_its_end_and_says_what_it_lost(tmp_path: Path) -> None:
    lines = [b"line %06d\n" % number for number in range(100_000)]
    path = log_of(tmp_path, "1", b"".join(lines))
    dropped = cut(path, most_bytes=500_000, kept_bytes=200_000)
    first, rest = read_kept(path)
    assert first == dropped > 0
    assert rest == b"".join(lines)[dropped:] and len(rest) >= 200_000
    assert room_of(path) < 400_000
    assert cut(path, most_bytes=500_000) == 0
    compress_ended(tmp_path, [], now=time.time() + 3600)
    packed = gzip.decompress((tmp_path / "1" / "worker-0.log.gz").read_bytes())
    assert packed == dropped_note(dropped) + rest


def test_where_the_file_system_knows_no_holes_the_end_is_kept_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_keeping, "_punch", lambda *_: False)
    lines = [b"line %06d\n" % number for number in range(10_000)]
    path = log_of(tmp_path, "1", b"".join(lines))
    dropped = cut(path, most_bytes=50_000, kept_bytes=10_000)
    note, rest = path.read_bytes().split(b"\n", 1)
    assert note + b"\n" == dropped_note(dropped)
    assert rest == b"".join(lines)[-len(rest) :]
    assert dropped + len(rest) == sum(map(len, lines))


@pytest.mark.usefixtures("holes")
def test_a_flood_stays_bounded_and_loses_nothing_of_its_end(tmp_path: Path) -> None:
    path = log_of(tmp_path, "1", b"")
    total = 50_000_000
    written = [0]

    def flood() -> None:
        with path.open("ab", buffering=0) as file:
            block = b"".join(b"%09d " % n * 9 + b"%09d\n" % n for n in range(1000))
            while written[0] < total:
                written[0] += file.write(block)
            written[0] += file.write(b"the last words\n")

    writer = threading.Thread(target=flood)
    writer.start()
    dropped = 0
    while writer.is_alive():
        dropped += cut(path, most_bytes=1_000_000, kept_bytes=200_000)
    writer.join()
    dropped += cut(path, most_bytes=1_000_000, kept_bytes=200_000)
    first, rest = read_kept(path)
    assert rest.endswith(b"the last words\n")
    assert first == dropped and first + len(rest) == written[0]
    assert room_of(path) < 1_500_000


def test_logs_of_ended_jobs_are_compressed_and_still_read(tmp_path: Path) -> None:
    text = b"hello\n" * 1000
    ended, running = log_of(tmp_path, "1", text, 3600), log_of(tmp_path, "2", text, 3600)
    fresh = log_of(tmp_path, "3", text)
    compress_ended(tmp_path, ["2"])
    assert not ended.exists()
    assert gzip.decompress((tmp_path / "1" / "worker-0.log.gz").read_bytes()) == text
    assert read_end(tmp_path / "1" / "worker-0.log.gz", 12) == (b"hello\nhello\n", 6000)
    assert running.exists()
    assert fresh.exists()
    log_of(tmp_path, "1", b"and on\n", 3600)  # a job that was held, and went on
    compress_ended(tmp_path, ["2"])
    assert gzip.decompress((tmp_path / "1" / "worker-0.log.gz").read_bytes()) == text + b"and on\n"
    assert read_end(tmp_path / "1" / "worker-0.log.gz", 13) == (b"hello\nand on\n", 6007)


def test_with_a_jobs_last_log_goes_all_that_it_left_on_the_node(tmp_path: Path) -> None:
    path, other = log_of(tmp_path, "1", b"x", 1000), log_of(tmp_path, "2", b"x", 1000)
    newer = other.with_name("worker-1.log")
    newer.write_bytes(b"x")
    for folder in (path.parent, other.parent):
        (folder / "work" / "code").mkdir(parents=True)
        (folder / "work" / "link").symlink_to(tmp_path / "2")
        owner_path(folder).write_text("somebody")
    assert expire(tmp_path, [], keep_seconds=500) == 2
    assert sorted(each.name for each in tmp_path.iterdir()) == ["2", "2.owner"]
    assert newer.exists() and (other.parent / "work" / "code").exists()


def test_old_logs_go_by_age_and_by_size_but_never_those_of_running_jobs(tmp_path: Path) -> None:
    old = log_of(tmp_path, "1", b"x" * 10, 1000)
    running = log_of(tmp_path, "2", b"x" * 10, 1000)
    large = log_of(tmp_path, "3", b"x" * 1000, 50)
    new = log_of(tmp_path, "4", b"x" * 10, 10)
    for folder in (old.parent, new.parent):
        note_ranks(folder, (8, 9))
    assert expire(tmp_path, ["2"], keep_seconds=500, keep_bytes=500) == 2
    assert not old.parent.exists()
    assert noted_ranks(old.parent) == () and noted_ranks(new.parent) == (8, 9)
    assert not large.exists()
    assert running.exists()
    assert new.exists()
