"""The core learns how often a fleet fails, and intervals between checkpoints follow."""

from __future__ import annotations

import pytest

from phalanx.plan.cost.failures import best_interval, mtbf_seconds
from phalanx.simulate.runner import played
from phalanx.simulate.scenario.load import load_scenario
from phalanx.simulate.world.gangs import Gangs
from phalanx.simulate.world.runs import GangRun

PRIOR = 3.789  # of the shipped policy, per 1000 node-days
GPUS = 2048
CHANGES = (
    f"fleet.gpus={GPUS}",
    "fleet.spare_nodes=32",
    "days=30",
    "faults.planned_per_day=0",
    "checkpoint.stall_seconds=5",
    "checkpoint.follows_failures=true",
)


@pytest.mark.parametrize(("factor", "within"), [(3.0, 0.10), (0.33, 0.20)])  # of nine failures
def test_after_a_month_the_interval_is_the_best_for_the_true_rate(
    factor: float, within: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    true, intervals, save_at_best = PRIOR * factor, [], Gangs._save_at_best

    def noted(gangs: Gangs, run: GangRun, rate: int) -> None:
        save_at_best(gangs, run, rate)
        intervals.append(run.expected.checkpoint_steps * run.full_ns / 1e9)

    monkeypatch.setattr(Gangs, "_save_at_best", noted)
    scenario = load_scenario("llama3-54d", [*CHANGES, f"faults.per_1000_node_days={true}"])
    result, world, _ = played(scenario, 1)
    assert not result.found
    (seen,) = world.core.failures(world.agenda.now_ns)
    assert seen.per_million_node_days == pytest.approx(1000 * true, rel=0.2)
    best = best_interval(mtbf_seconds(GPUS, true), 5.0)
    assert intervals[-1] == pytest.approx(best, rel=within)
    assert abs(best_interval(mtbf_seconds(GPUS, PRIOR), 5.0) / best - 1) > 0.3  # it had to learn
