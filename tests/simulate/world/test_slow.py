"""Fabric checks in virtual time: nodes that come back are measured, and slow ones are named."""

from __future__ import annotations

from phalanx.cluster.jobs.job import JobState
from phalanx.cluster.node import NodeState
from phalanx.simulate.runner import played
from phalanx.simulate.scenario.load import load_scenario

SMALL = [
    "fleet.gpus=256",
    "fleet.spare_nodes=12",
    "days=4",
    "faults.per_1000_node_days=150",
    "faults.planned_per_day=0",
    "faults.causes.silent_corruption=0",
    "repair.hours=1",
    "restart.seconds=20",
    "repair.missed_share=1.0",  # a node's own check sees nothing of its network
    "policy.fabric_checks=true",
]


def played_with(*changes: str):
    scenario = load_scenario("llama3-54d", [*SMALL, *changes])
    result, world, _ = played(scenario, 1)
    assert not result.found
    checks = [job for job in world.view.jobs.values() if job.spec.name == "fabric-check"]
    return world, checks


def test_nodes_that_come_back_are_measured_and_well_ones_stay() -> None:
    world, checks = played_with("faults.slow_per_1000_node_days=0")
    done = [job for job in checks if job.state is JobState.DONE]
    assert len(done) > 3
    reasons = [c.reason.code for h in world.fleet.history.values() for c in h]
    assert "fabric_slow" not in reasons


def test_a_node_with_a_slow_network_is_drained_and_no_other() -> None:
    world, _ = played_with(
        "faults.slow_per_1000_node_days=400",
        "faults.slow_share_network=1.0",
        "faults.slow_minutes=100000",
    )
    drained = {
        node
        for node, changes in world.fleet.history.items()
        if any(c.state is NodeState.DRAINING and c.reason.code == "fabric_slow" for c in changes)
    }
    assert drained
    assert drained <= set(world.slow._causes)  # some recovered since
