"""Programs in chaos seeds: one process a rank, and a core that waits for too little is found."""

from __future__ import annotations

import pytest

from phalanx.cluster.gang import fence, formation
from phalanx.cluster.jobs import departure, elastic
from phalanx.cluster.recovery import reshape
from phalanx.simulate.runner import run_seed
from phalanx.simulate.scenario.load import load_scenario

SEEDS = (8, 24, 27, 60)  # on which nodes are cut off, or counted as dead, while their program runs


def rules_broken() -> set[str]:
    """Rules that some of the seeds saw broken."""
    scenario = load_scenario("chaos", ["chaos.programs=1.0"])
    results = [run_seed(scenario, seed) for seed in SEEDS]
    return {found.split()[0] for result in results for found in result.found}


def test_two_processes_of_a_rank_never_run_at_a_time() -> None:
    assert rules_broken() == set()


def test_a_core_that_waits_for_no_program_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "over_ns", lambda ctx, job: 0)
    assert "two_writers" in rules_broken()


def test_a_core_that_waits_for_lost_nodes_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (departure, elastic, formation, reshape):
        monkeypatch.setattr(module, "fence_left", lambda ctx, job, nodes: None)
    assert "two_writers" in rules_broken()
