"""Policies on a small trace through the core, and beside the textbook's schedulers."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from benchmarks.policies import reference
from phalanx.config import ConfigError
from phalanx.simulate.policies.named import POLICIES
from phalanx.simulate.policies.study import StudyReport, TraceAsked, asked_trace, study

JOBS = 90


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Jobs of four teams that ask for more than 32 GPUs for some hours."""
    luck, path = random.Random(5), tmp_path_factory.mktemp("trace") / "trace.csv"
    rows = ["submit_time,duration,gpu_num,vc"]
    for _ in range(JOBS):
        gpus = luck.choice([1, 1, 1, 1, 2, 4, 8, 16])
        seconds = round(luck.lognormvariate(7, 1.2)) + 60
        rows.append(f"{luck.randrange(12_000)},{seconds},{gpus},vc-{luck.choice('aaab')}")
    path.write_text("\n".join(rows) + "\n")
    return str(path)


@cache
def played(trace: str, names: tuple[str, ...], faults: str = "") -> StudyReport:
    asked = TraceAsked(file=trace, gpus=32, faults=faults)
    if faults:
        asked = TraceAsked(
            file=trace, gpus=32, faults=faults, overrides=("faults.per_1000_node_days=2000",)
        )
    return study(*asked_trace(asked), names)


def test_every_policy_ends_every_job_and_breaks_no_rule(trace: str) -> None:
    report = played(trace, tuple(POLICIES))
    assert [one.name for one in report.policies] == list(POLICIES)
    for one in report.policies:
        assert (one.outcome.jobs, one.refused, one.outcome.unfinished) == (JOBS, 0, 0)
        assert not one.violations
    found = {one.name: one.outcome for one in report.policies}
    assert found["easy"].wait_hours.mean < found["fifo"].wait_hours.mean
    assert found["preemption"].preempted_gpu_hours > 0 == found["default"].preempted_gpu_hours
    assert found["default"].wait_hours.mean < found["easy"].wait_hours.mean
    assert found["elastic"].wait_hours.mean != found["half-slots"].wait_hours.mean


@pytest.mark.parametrize("kind", ["fifo", "easy"])
def test_the_core_waits_as_long_as_the_textbook_scheduler(trace: str, kind: str) -> None:
    (mine,) = (one for one in played(trace, tuple(POLICIES)).policies if one.name == kind)
    theirs = reference(kind, *asked_trace(TraceAsked(file=trace, gpus=32)))
    assert mine.outcome.wait_hours.mean == pytest.approx(theirs.wait_hours.mean, rel=0.05)


def test_the_shortest_job_first_waits_least_of_all_references(trace: str) -> None:
    asked = asked_trace(TraceAsked(file=trace, gpus=32))
    waits = {
        kind: reference(kind, *asked).wait_hours.mean
        for kind in ("fifo", "easy", "greedy", "shortest")
    }
    assert min(waits, key=lambda kind: waits[kind]) == "shortest"
    assert max(waits, key=lambda kind: waits[kind]) == "fifo"


def test_failures_come_on_top_and_jobs_still_end(trace: str) -> None:
    (calm,) = played(trace, ("default",)).policies
    (failing,) = played(trace, ("default",), "llama3").policies
    assert failing.interruptions > 0 == calm.interruptions
    assert (failing.outcome.unfinished, failing.violations) == (0, [])
    assert failing.goodput > 0


def test_a_part_of_a_trace_and_settings_of_the_queue(trace: str) -> None:
    asked = TraceAsked(file=trace, gpus=32, skip=20, jobs=40, overrides=("queue.size_weight=50",))
    scenario, found = asked_trace(asked)
    assert (len(found.jobs), scenario.queue.size_weight) == (40, 50)
    assert found.jobs[0][0] == 0


def test_what_cannot_be_is_refused(trace: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        asked_trace(TraceAsked(file=str(tmp_path / "none.csv"), gpus=32))
    with pytest.raises(ConfigError, match="did you mean"):
        study(*asked_trace(TraceAsked(file=trace, gpus=32)), ["easi"])
    with pytest.raises(ConfigError, match="size_wait"):
        asked_trace(TraceAsked(file=trace, gpus=32, overrides=("queue.size_wait=1",)))
