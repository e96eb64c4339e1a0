"""The checkpoint interval: from stall and failures, the same on all ranks, with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from phalanx.plan.cost.failures import best_interval, goodput
from phalanx.train.exits import ExitCode, ExitInfo
from phalanx.train.resume.interval import (
    Estimate,
    FleetRate,
    History,
    SaveSchedule,
    estimate,
    read_history,
)
from tests.train.forked_runs import Run, small_job


def estimated(**changes: Any) -> Estimate:
    settings: dict[str, Any] = {
        "world_size": 16384,
        "failure_rate": "llama3",
        "history": History(),
        "stall_seconds": 0.2,
        "flush_seconds": 0.0,
        "step_seconds": 5.0,
    }
    return estimate(**(settings | changes))


def test_the_interval_is_the_one_that_keeps_most_work() -> None:
    found = estimated()
    assert found.seconds == best_interval(found.mtbf_seconds, 0.2)
    kept = goodput(found.mtbf_seconds, found.seconds, 0.2, 100.0)
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert goodput(found.mtbf_seconds, factor * found.seconds, 0.2, 100.0) < kept
    assert found.steps == -(-found.seconds // 5)


def test_more_ranks_or_a_shorter_stall_mean_more_checkpoints() -> None:
    assert estimated(world_size=98304).seconds < estimated().seconds
    assert estimated(stall_seconds=0.05).seconds < estimated().seconds


def test_a_checkpoint_is_never_begun_before_the_last_one_is_written() -> None:
    assert estimated(flush_seconds=3600.0).seconds == 3600.0


def test_failures_that_were_seen_outweigh_the_plan() -> None:
    unlucky = estimated(history=History(seconds=3600.0, failures=9))
    calm = estimated(history=History(seconds=90 * 86400.0, failures=0))
    assert unlucky.mtbf_seconds < estimated().mtbf_seconds < calm.mtbf_seconds
    assert "9 seen" in unlucky.reason and "planned: llama3" in calm.reason


def test_the_reason_names_stall_failures_and_youngs_rule() -> None:
    assert "stall of 0.20 s" in estimated().reason and "Young" in estimated().reason


def test_earlier_runs_of_the_name_are_counted(tmp_path: Path) -> None:
    ends = {"a": ExitCode.LOST_PEER, "b": ExitCode.DONE, "c": ExitCode.CONFIG}
    for number, (tail, code) in enumerate(ends.items()):
        run = tmp_path / f"20260101-00000{number}-{tail}"
        run.mkdir()
        info = ExitInfo(code=code, reason="", message="", finished="2026-01-01T01:00:00+00:00")
        (run / "exit_info.json").write_bytes(msgspec.json.encode(info))
    (tmp_path / "20260101-000009-d").mkdir()
    (tmp_path / "20260101-000009-d" / "exit_info.json").write_text("{")
    history = read_history(tmp_path)
    assert history.failures == 1 and history.seconds == pytest.approx(3 * 3600, abs=10)


def test_all_ranks_follow_rank_zero(tmp_path: Path) -> None:
    job = small_job(tmp_path, checkpoint__failure_rate=1e5)
    said: list[object] = []

    def agreed(value: object) -> object:
        said.append(value)
        return said[0]

    fast, slow = (SaveSchedule(job, 1, 1, agreed) for _ in range(2))
    step = next(step for step in range(1, 100) if fast.renews(step))
    assert slow.renews(step)
    fast.renew(step, 1.0, 0.2, 0.0)
    slow.renew(step, 9.0, 5.0, 100.0)
    due = [s for s in range(step, step + 100_000) if fast.is_due(s)]
    assert due and due == [s for s in range(step, step + 100_000) if slow.is_due(s)]
    prepared = [s for s in range(step, due[0]) if fast.prepares(s)]
    assert len(prepared) == 1


def test_estimates_are_renewed_ever_more_rarely(tmp_path: Path) -> None:
    job = small_job(tmp_path, checkpoint__failure_rate=1e5)
    schedule = SaveSchedule(job, 1, 1, lambda value: value)
    renewals = saves = 0
    for step in range(1, 2000):
        if schedule.renews(step):
            schedule.renew(step, 1000.0, 0.2, 0.0)
            renewals += 1
        if schedule.is_due(step):
            schedule.saved(step)
            saves += 1
    assert saves > 100 and renewals <= 12


def test_the_fleets_rate_renews_the_interval_at_the_next_step(tmp_path: Path) -> None:
    schedule = SaveSchedule(small_job(tmp_path), 1024, 1, lambda value: value)
    schedule.follow(FleetRate(3_789, 0, 0), 2)
    assert not schedule.renews(2)  # nothing is measured yet
    first = schedule.renew(9, 1.0, 0.2, 0.0)
    assert "0 in 0 node-days of this fleet" in first.basis
    worse = FleetRate(4 * 3_789, 11, 800)
    schedule.follow(worse, 20)
    assert schedule.renews(20)
    second = schedule.renew(20, 1.0, 0.2, 0.0)
    assert second.seconds == pytest.approx(first.seconds / 2, rel=0.02)  # the root of four
    assert "11 in 800 node-days of this fleet" in second.reason
    assert schedule.is_due(9 + second.steps)  # counted from where the interval began
    schedule.follow(worse, 30)
    assert not schedule.renews(30)


def test_a_checkpoint_that_is_overdue_at_the_new_rate_is_due_at_once(tmp_path: Path) -> None:
    schedule = SaveSchedule(small_job(tmp_path), 1024, 1, lambda value: value)
    schedule.renew(9, 1.0, 0.2, 0.0)
    schedule.follow(FleetRate(10_000_000, 999, 99), 1000)
    made = schedule.renew(1000, 1.0, 0.2, 0.0)
    assert made.steps < 900 and schedule.is_due(1001)


def test_a_rate_that_the_job_names_stays(tmp_path: Path) -> None:
    job = small_job(tmp_path, checkpoint__failure_rate="rsc-1")
    schedule = SaveSchedule(job, 1024, 1, lambda value: value)
    schedule.renew(9, 1.0, 0.2, 0.0)
    schedule.follow(FleetRate(99_000, 9, 90), 20)
    assert not schedule.renews(20)


def test_fixed_steps_and_off_leave_the_clock_out_of_it(tmp_path: Path) -> None:
    fixed = SaveSchedule(small_job(tmp_path, checkpoint__every=3), 1, 1, lambda v: v)
    assert [step for step in range(1, 10) if fixed.is_due(step)] == [3, 6, 9]
    off = SaveSchedule(small_job(tmp_path, checkpoint__interval="off"), 1, 1, lambda v: v)
    assert not any(off.is_due(step) or off.renews(step) for step in range(1, 1000))


def test_a_run_saves_by_itself_and_says_why(tmp_path: Path) -> None:
    """With a failure rate that makes saving worth while after a step or two."""
    job = small_job(
        tmp_path,
        checkpoint__failure_rate=100_000,
        checkpoint__at_end="false",
        train__steps=30,
        log__every=10,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("phalanx.train.resume.interval.best_interval", lambda mtbf, stall: 0.2)
        run = Run(job)
        assert run.wait() == ExitCode.DONE
    info = run.folder.read_exit()
    assert info is not None and "loses least with a stall" in info.details["checkpoint_interval"]
    assert list(run.folder.checkpoints.glob("step-*/manifest.json"))
