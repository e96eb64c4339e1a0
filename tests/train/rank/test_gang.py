"""What the launcher knows about its ranks without being told."""

from __future__ import annotations

import os
from pathlib import Path

from phalanx.train.rank.gang import memory_left, oom_kills
from phalanx.train.report.progress import PipeSink, duration
from phalanx.train.report.provenance import git_state
from phalanx.train.report.records import StepRecord, decode
from tests.train.sample_records import step_record


def test_kills_for_lack_of_memory_are_counted_per_place(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("low 0\nhigh 3\noom 2\noom_kill 1\n")
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 100\noom_kill 7\n")
    assert oom_kills(tmp_path, vmstat) == {
        str(tmp_path / "memory.events"): 1,
        str(vmstat): 7,
    }


def test_a_machine_without_these_counters_has_no_evidence(tmp_path: Path) -> None:
    assert oom_kills(tmp_path / "no", tmp_path / "none") == {}


def test_the_memory_left_is_told_in_the_kernels_words() -> None:
    assert "MemTotal" in memory_left() and "MemAvailable" in memory_left()


def test_reports_never_wait_for_a_reader_and_stay_whole() -> None:
    reader, writer = os.pipe()
    sink = PipeSink(writer)
    for step in range(1000):  # far more than a pipe holds, and nobody reads
        sink.write(step_record(step))
    sink.close()
    with os.fdopen(reader, "rb") as pipe:
        records = [decode(line) for line in pipe]
    assert 0 < len(records) < 1000
    assert all(isinstance(record, StepRecord) for record in records)


def test_reports_to_a_vanished_reader_are_dropped() -> None:
    reader, writer = os.pipe()
    sink = PipeSink(writer)
    os.close(reader)
    sink.write(step_record(1))
    sink.close()


def test_durations_are_hours_minutes_and_seconds() -> None:
    assert [duration(s) for s in (0.4, 59.6, 3725.0, None)] == [
        "0:00:00",
        "0:01:00",
        "1:02:05",
        "unknown",
    ]


def test_git_state_tells_a_clean_tree_from_a_changed_one(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = "-c user.name=t -c user.email=t@example.org"
        assert os.system(f"git -C {tmp_path} {who} {' '.join(words)} >/dev/null 2>&1") == 0

    git("init")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "one")
    clean = git_state(tmp_path)
    (tmp_path / "file").write_text("two")
    changed = git_state(tmp_path)
    assert clean is not None and changed is not None
    assert (clean.dirty, clean.diff_sha256) == (False, "")
    assert changed.dirty and len(changed.diff_sha256) == 64
    assert clean.commit == changed.commit and len(clean.commit) == 40


def test_outside_a_repository_there_is_no_git_state(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
