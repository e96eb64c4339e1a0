"""Failures by the age of nodes, and spares that follow how often nodes fail."""

from __future__ import annotations

from phalanx.cluster.core import Core
from phalanx.cluster.gang.node_rates import down_ppm
from phalanx.cluster.gang.seen_failures import GroupFailures, SeenFailures, seen
from phalanx.cluster.jobs.job import ClusterJob, GangShape
from phalanx.cluster.node import Node, NodeState
from phalanx.cluster.policy import DAY_NS, HealthPolicy, Policy, SparePolicy
from phalanx.cluster.protocol.commands import Notify
from phalanx.cluster.protocol.events import NodeJoined, NodeRepaired
from phalanx.cluster.protocol.messages import CheckResult, Inventory, WorkerExited
from tests.cluster.drive import SECOND, Drive

ONE = GangShape(replicas=1, tensor=8, slot_gpus=8, slot_cpus=8)


def known(drive: Drive) -> SeenFailures:
    ctx = drive.core._ctx
    (one,) = seen(ctx.health, ctx.policy.health, drive.now_ns)
    return one


def ages(drive: Drive) -> dict[str, GroupFailures]:
    return {each.group: each for each in known(drive).ages}


def breaks(drive: Drive, job: ClusterJob, cause: str = "hbm_ecc") -> None:
    failed = WorkerExited(
        node=job.placement.nodes[0],
        job=job.id,
        generation=job.generation,
        rank=0,
        cause=cause,
        step=job.step,
    )
    drive.tell(failed)
    drive.settle(job)


def join(drive: Drive, count: int) -> None:
    for number in range(count):
        node = Node(name=f"new{number}", kind="h100", rails=8)
        drive.tell(NodeJoined(node=node, inventory=Inventory(1, (), ())))
    drive.wait(SECOND)


def test_time_and_failures_are_counted_by_the_age_that_nodes_have() -> None:
    drive = Drive(nodes=0)
    join(drive, 2)
    job = drive.running(1, gang=ONE)
    drive.wait(8 * DAY_NS)
    breaks(drive, job)
    found = ages(drive)
    assert list(found) == ["first day", "first week", "first month"]
    days = [each.gpu_seconds / 8 / 86400 for each in found.values()]
    assert [round(each, 1) for each in days] == [1.0, 6.0, 1.0]
    assert [each.failures for each in found.values()] == [0, 0, 1]
    assert found["first month"].per_million_node_days > found["first week"].per_million_node_days


def test_a_node_whose_beginning_nobody_saw_is_old_and_one_that_was_repaired_is_new() -> None:
    drive = Drive(nodes=2)
    job = drive.running(1, gang=ONE)
    drive.wait(DAY_NS)
    breaks(drive, job)
    assert list(ages(drive)) == ["older"]
    (gone,) = [n for n in range(2) if drive.core.view.fleet.state(n) is not NodeState.HEALTHY]
    drive.tell(NodeRepaired(node=gone))
    drive.tell(CheckResult(node=gone, check="full", passed=True), SECOND)
    assert drive.core._ctx.health.in_service == {gone: drive.now_ns - SECOND}


def test_little_that_was_seen_of_an_age_says_little() -> None:
    few = GroupFailures(group="first day", gpu_seconds=0, failures=0, prior=4000)
    assert abs(few.per_million_node_days - 4000) <= 1
    more = GroupFailures(group="first day", gpu_seconds=8 * 86400 * 250, failures=9, prior=4000)
    assert 19_000 < more.per_million_node_days < 21_000


def test_a_snapshot_keeps_ages() -> None:
    drive = Drive(nodes=0)
    join(drive, 2)
    job = drive.running(1, gang=ONE)
    drive.wait(3 * DAY_NS)
    twin, since = Core.restore(drive.core.snapshot()), len(drive.log)
    breaks(drive, job)
    for event in drive.log[since:]:
        twin.handle(event)
    assert twin.snapshot() == drive.core.snapshot()


FOLLOWS = Policy(
    spares=SparePolicy(nodes=-1), health=HealthPolicy(failures_per_million_node_days=1000)
)


def spares(drive: Drive) -> int:
    fleet = drive.core.view.fleet
    return sum(fleet.state(node) is NodeState.SPARE for node in range(len(fleet)))


def test_spares_follow_the_rate_and_the_log_says_why() -> None:
    drive = Drive(nodes=64, policy=FOLLOWS)
    job = drive.running(1, gang=ONE)
    few, chance = spares(drive), down_ppm(drive.core._ctx, DAY_NS)
    for _ in range(6):
        breaks(drive, job)
        drive.run(job)
    drive.wait(DAY_NS)
    assert down_ppm(drive.core._ctx, DAY_NS) > 3 * chance and spares(drive) > few
    told = [each.reason for each in drive.bodies(Notify) if each.reason.code == "spares_follow"]
    assert told and told[-1].facts["nodes"] > told[0].facts["before"]
    assert "are kept as spares instead of" in str(told[-1])
    drive.core.ledger.check(drive.core.view)


def test_spares_that_are_no_longer_needed_are_given_back() -> None:
    often = Policy(
        spares=SparePolicy(nodes=-1), health=HealthPolicy(failures_per_million_node_days=100_000)
    )
    drive = Drive(nodes=64, policy=often)
    drive.running(1, gang=GangShape(replicas=40, tensor=8, slot_gpus=8, slot_cpus=8))
    many = spares(drive)
    drive.wait(30 * DAY_NS)  # without a failure
    assert 0 < spares(drive) < many


def test_a_chance_that_the_site_gives_is_kept() -> None:
    given = Policy(spares=SparePolicy(nodes=-1, down_ppm=20_000))
    drive = Drive(nodes=64, policy=given)
    job = drive.running(1, gang=ONE)
    kept = spares(drive)
    breaks(drive, job)
    drive.run(job)
    drive.wait(DAY_NS)
    assert not [each for each in drive.bodies(Notify) if each.reason.code == "spares_follow"]
    assert spares(drive) == kept
