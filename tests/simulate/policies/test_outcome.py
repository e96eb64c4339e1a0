"""Figures of a policy, on jobs whose figures are known."""

from __future__ import annotations

import pytest

from phalanx.simulate.policies.outcome import PlayedJob, fluid_ends, outcome_of, shares, spread

HOUR = 3600.0


def job(team: str, gpus: int, submit: float, start: float, run: float) -> PlayedJob:
    return PlayedJob(team, gpus, submit, run, [(start, start + run, gpus)], start + run)


def test_percentiles_are_values_that_occurred() -> None:
    found = spread(float(value) for value in range(1, 101))
    assert (found.mean, found.p50, found.p95, found.p99, found.longest) == (50.5, 50, 95, 99, 100)
    assert spread([]).mean == 0.0


def test_waits_completion_and_slowdown() -> None:
    jobs = [job("a", 8, 0.0, 0.0, HOUR), job("b", 8, 0.0, HOUR, HOUR)]
    found = outcome_of(jobs, 8)
    assert found.wait_hours.mean == 0.5
    assert found.completion_hours.longest == 2.0
    assert found.slowdown.longest == 2.0
    assert found.by_team["b"].wait_hours.mean == 1.0
    assert list(found.by_size) == ["5-8"]


def test_all_share_alike_in_the_fluid_ideal() -> None:
    jobs = [job("a", 8, 0.0, 0.0, 100.0), job("b", 8, 0.0, 100.0, 100.0)]
    assert fluid_ends(jobs, 8) == pytest.approx([200.0, 200.0])
    assert fluid_ends(jobs, 16) == pytest.approx([100.0, 100.0])
    late = [job("a", 8, 0.0, 0.0, 100.0), job("b", 8, 50.0, 100.0, 100.0)]
    # Alone for 50, then at half speed: the first needs 100 more, the second has 50 left then.
    assert fluid_ends(late, 8) == pytest.approx([150.0, 200.0])
    found = outcome_of(jobs, 8)
    assert found.finish_ratio.mean == pytest.approx((0.5 + 1.0) / 2)
    assert found.worst_team_ratio == pytest.approx(1.0)


def test_free_gpus_count_as_fragmented_only_while_somebody_asks_for_no_more() -> None:
    small = [job("a", 4, 0.0, 0.0, 100.0), job("b", 4, 0.0, 100.0, 10.0), job("c", 1, 200, 200, 1)]
    used, scattered = shares(small, 8)
    assert used == pytest.approx((4 * 100 + 4 * 10) / (8 * 200))
    assert scattered == pytest.approx(4 * 100 / (8 * 200))
    large = [job("a", 4, 0.0, 0.0, 100.0), job("b", 8, 0.0, 100.0, 10.0), job("c", 1, 200, 200, 1)]
    assert shares(large, 8)[1] == 0.0


def test_what_was_preempted_is_counted_in_gpu_hours() -> None:
    sent_away = PlayedJob(
        "a", 2, 0.0, HOUR, [(0.0, HOUR / 2, 2), (HOUR, 1.5 * HOUR, 2)], 1.5 * HOUR, [0]
    )
    found = outcome_of([sent_away], 8)
    assert found.preempted_gpu_hours == 1.0
    assert found.wait_hours.mean == 0.5
