"""Snapshots are thinned where they cost too much, and never below what the job allows."""

from __future__ import annotations

from itertools import pairwise

import pytest

from phalanx.config import Job, job_from_table
from phalanx.train.resume.pace import FIRST_STEPS, PaceMeasure, SnapshotPace, decide


def every(cost: float, step: float, share: float = 0.03, most: int = 64, now: int = 1) -> int:
    return decide(PaceMeasure(cost, step), share, most, now).every


@pytest.mark.parametrize(
    ("cost", "step", "wanted"),
    [
        (0.0, 0.2, 1),
        (0.006, 0.2, 1),  # 3 % exactly
        (0.0061, 0.2, 2),
        (0.102, 0.218, 16),  # a small model on a fast card
        (3.0, 0.2, 64),
    ],
)
def test_the_cost_stays_within_its_share(cost: float, step: float, wanted: int) -> None:
    pace = decide(PaceMeasure(cost, step), 0.03, 64, 1)
    assert pace.every == wanted
    assert pace.bounded == (pace.share > 0.03 + 1e-9)


def test_steps_at_risk_are_bounded_whatever_it_costs() -> None:
    pace = decide(PaceMeasure(3.0, 0.2), 0.03, 10, 1)
    assert (pace.every, pace.bounded) == (10, True) and pace.share == pytest.approx(1.5)


def test_what_varies_a_little_changes_nothing() -> None:
    assert every(0.100, 0.218, now=16) == 16
    assert every(0.060, 0.218, now=16) == 16  # 10 would do
    assert every(0.052, 0.218, now=16) == 8
    assert every(0.110, 0.218, now=16) == 17


def pace(largest: list[list[float]] | None = None, **checkpoint: float) -> SnapshotPace:
    """Of a start at step 100, alone or with what the ranks measured together."""
    job: Job = job_from_table({"checkpoint": checkpoint})
    return SnapshotPace(job, 101, lambda own: largest.pop(0) if largest else own)


def run(found: SnapshotPace, first: int, steps: int, cost: float, step: float = 0.2) -> None:
    for number in range(first, first + steps):
        has = number % found.every == 0
        found.stepped(number, step + (cost if has else 0.0), cost if has else 0.0)


def test_the_first_decision_ignores_steps_that_warm_up() -> None:
    found = pace()
    run(found, 101, 2, cost=30.0, step=60.0)
    run(found, 103, FIRST_STEPS - 2, cost=0.1)
    assert not found.renews(100 + FIRST_STEPS) and found.renews(101 + FIRST_STEPS)
    said = found.renew(101 + FIRST_STEPS)
    assert found.every == 17
    assert said == (
        "every 17 steps from here on, 1 step before: one takes 0.100 s from a step of 0.200 s, "
        "together 2.9%; a failure costs up to 17 steps"
    )


def test_all_ranks_follow_the_slowest_copy() -> None:
    ranks = [pace([[0.1, 0.2]]) for _ in range(3)]
    for cost, found in zip((0.0, 0.05, 0.1), ranks, strict=True):
        run(found, 101, FIRST_STEPS, cost)
        found.renew(109)
    assert {found.every for found in ranks} == {17}


def test_thinned_snapshots_are_measured_again_and_come_back() -> None:
    found = pace()
    run(found, 101, FIRST_STEPS, 0.1)
    found.renew(109)
    run(found, 109, 60, 0.1)
    assert found.renew(169) == "" and found.every == 17
    run(found, 169, 60, 0.004)
    assert found.renew(229).startswith("every 1 step from here on, 17 steps before")


def test_nothing_measured_changes_nothing() -> None:
    found = pace()
    assert found.renew(109) == "" and found.every == 1


def test_decisions_become_rarer() -> None:
    found, step, at = pace(), 101, []
    while len(at) < 10:
        if found.renews(step):
            found.renew(step)
            at.append(step)
        step += 1
    assert [b - a for a, b in pairwise(at)][-2:] == [512, 512]


def test_where_the_bound_is_reached_it_is_said() -> None:
    found = pace(memory_at_most=4)
    run(found, 101, FIRST_STEPS, 0.1)
    said = found.renew(109)
    assert found.every == 4 and "a failure costs up to 4 steps" in said
    assert "checkpoint.memory_at_most; 3.0% would need more" in said
