"""Fleets of equal and of mixed nodes."""

from __future__ import annotations

import pytest

from phalanx.config import ConfigError
from phalanx.simulate.draws import SeedDraws
from phalanx.simulate.runner import run_seed
from phalanx.simulate.scenario.load import load_scenario
from phalanx.simulate.scenario.rates import causes_of
from phalanx.simulate.scenario.shape import make_fleet
from phalanx.simulate.world.incidents import Rates

MIXED = ("fleet.gpus=64", "fleet.small_nodes=4", "fleet.spare_nodes=1")


def test_small_nodes_are_part_of_all_gpus_and_spares_are_large() -> None:
    fleet = make_fleet(load_scenario("multi-tenant", MIXED))
    assert [node.gpus for node in fleet.nodes] == [8] * 6 + [4] * 4 + [8]


def test_a_small_node_fails_as_much_less_often_and_all_together_as_often() -> None:
    scenario = load_scenario("multi-tenant", [*MIXED, "faults.lemon_share=0"])
    rates = Rates(scenario, make_fleet(scenario), SeedDraws(0))
    cause = next(one for one in causes_of(scenario) if one.scope == "node")
    found = rates.per_day(cause)
    assert found[6] == pytest.approx(found[0] / 2)
    assert found[:10].sum() == pytest.approx(cause.per_day)


def test_jobs_run_on_both_sizes_and_no_rule_is_broken() -> None:
    result = run_seed(load_scenario("multi-tenant", [*MIXED, "days=2", "workload.teams=2"]), 0)
    assert result.jobs_done > 10 and not result.found


def test_one_job_needs_nodes_that_are_alike() -> None:
    with pytest.raises(ConfigError, match="like nodes"):
        load_scenario("llama3-54d", MIXED)
    with pytest.raises(ConfigError, match="lower it"):
        load_scenario("multi-tenant", ["fleet.gpus=64", "fleet.small_nodes=17"])
