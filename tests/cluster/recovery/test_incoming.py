"""Who comes into a gang: nodes that are expected to fail less go first, and the log says so."""

from __future__ import annotations

import pytest

from phalanx.cluster.core import Core
from phalanx.cluster.jobs.job import GangShape
from phalanx.cluster.policy import DAY_NS, HealthPolicy, Policy
from phalanx.cluster.protocol.commands import Notify
from phalanx.cluster.protocol.events import NodeSilent
from phalanx.cluster.recovery.incoming import incoming
from tests.cluster.drive import SECOND, Drive

FOUR = GangShape(replicas=4, tensor=8, slot_gpus=8, slot_cpus=8)
OFTEN = Policy(health=HealthPolicy(failures_per_million_node_days=100_000))


def with_past(drive: Drive, failed: dict[int, int], young: dict[int, int]) -> None:
    """Nodes of which such were seen to fail much more often than others."""
    health = drive.core._ctx.health
    for node, times in failed.items():
        health.failed[node] = [drive.now_ns // DAY_NS] * times
    for node, days in young.items():
        health.in_service[node] = drive.now_ns - days * DAY_NS
    day = health.failures["h100"].days[-1]
    for group in ("older, failed more often", "first day", "older, failed once"):
        day.aged_failures[group] = 40
        day.causes["hbm_ecc"] = day.causes.get("hbm_ecc", 0) + 40
        day.aged_gpu_seconds[group] = 100 * 8 * 86400
        day.gpu_seconds += 100 * 8 * 86400
    day.aged_gpu_seconds["older"] = 10_000 * 8 * 86400
    day.gpu_seconds += 10_000 * 8 * 86400
    drive.core._ctx.node_rates = None


@pytest.mark.parametrize(
    ("failed", "young", "first"),
    [
        ({}, {}, True),
        ({0: 2}, {}, False),  # failed more often than others
        ({}, {0: 0}, False),  # new
        ({}, {0: 60}, True),  # no longer
        ({0: 2, 1: 2}, {}, True),  # both alike
    ],
)
def test_of_two_spares_the_one_that_is_expected_to_fail_less_comes_in(
    failed: dict[int, int], young: dict[int, int], first: bool
) -> None:
    drive = Drive(8, OFTEN)
    job = drive.running(gang=FOUR, spares=2)
    drive.wait(3600 * SECOND)
    spares = job.placement.spares
    lost = job.placement.nodes[1]
    usual = dict(incoming(drive.core._ctx, job, (lost,)))[1]
    other = next(node for node in spares if node != usual)
    named = (usual, other)
    drive.tell(NodeSilent(node=lost))
    with_past(
        drive,
        {named[spare]: times for spare, times in failed.items()},
        {named[spare]: days for spare, days in young.items()},
    )
    twin, since = Core.restore(drive.core.snapshot()), len(drive.log)
    drive.wait(SECOND)
    assert job.placement.nodes[1] == (usual if first else other)
    said = [each.reason for each in drive.bodies(Notify) if each.reason.code == "safer"]
    assert len(said) == (0 if first else 1)
    for why in said:
        assert why.facts["node"] == f"n{other}" and why.facts["other"] == f"n{usual}"
        assert float(why.facts["rate"]) < float(why.facts["other_rate"])
    for event in drive.log[since:]:
        twin.handle(event)
    assert twin.snapshot() == drive.core.snapshot()
