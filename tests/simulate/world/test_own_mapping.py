"""A job without spares goes on with other mappings while nodes are missing, and returns."""

from __future__ import annotations

import pytest

from phalanx.config.errors import ConfigError
from phalanx.simulate.runner import played
from phalanx.simulate.scenario.load import load_scenario

CHANGES = (
    "fleet.gpus=512",
    "fleet.spare_nodes=0",
    "days=20",
    "faults.per_1000_node_days=20",
    "faults.planned_per_day=0",
)


def test_it_returns_whenever_its_nodes_are_back_and_loses_no_step() -> None:
    waits, goes_on = (
        played(load_scenario("llama3-54d", [*CHANGES, f"job.fallbacks={way}"]), 1)[:2]
        for way in ("false", "true")
    )
    result, world = goes_on
    (job,) = world.view.jobs.values()
    assert not result.found and job.lost_steps == 0
    remaps, returns = result.rungs["remap"], result.rungs["own_mapping"]
    assert remaps >= 5 and remaps - 2 <= returns <= remaps
    assert result.steps > 2 * waits[0].steps


def test_a_job_that_can_shrink_has_no_other_mappings() -> None:
    with pytest.raises(ConfigError, match=r"job\.fallbacks"):
        load_scenario("llama3-54d", ["job.fallbacks=true", "job.least_replicas=1"])
