"""Checks of the fabric that the core has made: when, on which nodes, and what follows from them."""

from __future__ import annotations

import msgspec
import pytest

from phalanx.cluster.core import Core
from phalanx.cluster.fabric.verdict import (
    FabricCheckWork,
    FabricFinding,
    FabricVerdict,
    encode_work,
)
from phalanx.cluster.forecast.why import explain
from phalanx.cluster.jobs.job import ClusterJob, GangShape
from phalanx.cluster.node import Node, NodeState
from phalanx.cluster.policy import FabricCheckPolicy, Policy, SparePolicy
from phalanx.cluster.protocol.commands import Notify
from phalanx.cluster.protocol.events import (
    Cancel,
    ControllerStarted,
    JobFinished,
    NodeJoined,
    NodeSilent,
)
from phalanx.cluster.protocol.messages import CheckResult, DeviceError, Inventory
from tests.cluster.drive import SECOND, Drive, fleet_of

AT_JOIN = FabricCheckPolicy(at_join=True)
BEFORE = FabricCheckPolicy(before_nodes=4)
GANG = {"gang": GangShape(replicas=4, tensor=8, slot_gpus=8)}


def site(checks: FabricCheckPolicy, nodes: int = 8) -> Drive:
    return Drive(nodes, Policy(fabric_checks=checks))


def join(drive: Drive, *names: str, gpus: int = 8) -> None:
    for name in names:
        node = Node(name=name, gpus=gpus, kind="h100", rails=8, leaf="leaf9")
        drive.tell(NodeJoined(node=node, inventory=Inventory(incarnation=1)))


def checks_of(drive: Drive) -> list[ClusterJob]:
    return [job for job in drive.core.view.jobs.values() if job.spec.name == "fabric-check"]


def under_way(drive: Drive) -> ClusterJob:
    (job,) = [job for job in checks_of(drive) if not job.ended]
    return job


def names_of(drive: Drive, job: ClusterJob) -> list[str]:
    assert job.placement is not None
    return [drive.core.view.fleet.nodes[node].name for node in job.placement.nodes]


def finish(drive: Drive, *slow: str, unclear: str = "", result: str | None = None) -> ClusterJob:
    """The check under way ends, and has found these nodes slow."""
    job = under_way(drive)
    drive.run(job)
    findings = tuple(FabricFinding(text=f"node {name}: 60%", nodes=(name,)) for name in slow)
    verdict = FabricVerdict(findings=findings, unclear=unclear)
    text = msgspec.json.encode(verdict).decode() if result is None else result
    drive.tell(JobFinished(job=job.id, generation=job.generation, step=0, result=text))
    return job


def state(drive: Drive, name: str) -> NodeState:
    fleet = drive.core.view.fleet
    return fleet.state(fleet.index[name])


def told(drive: Drive) -> list[str]:
    return [str(each.reason) for each in drive.bodies(Notify)]


def test_by_default_nobody_is_measured() -> None:
    drive = site(FabricCheckPolicy())
    join(drive, "a", "b", "c", "d")
    drive.wait(600 * SECOND)
    drive.submit(**GANG)
    assert checks_of(drive) == []


def test_a_wave_of_joins_is_measured_once_with_peers_when_it_has_settled() -> None:
    drive = site(AT_JOIN)
    for second in range(5):
        join(drive, f"a{second}")
        drive.wait(SECOND)
    assert checks_of(drive) == []
    drive.wait(10 * SECOND)
    job = under_way(drive)
    assert len(names_of(drive, job)) == 5 + 8 and "a0" in str(job.placement.reason)
    work = msgspec.json.decode(job.spec.payload, type=FabricCheckWork)
    assert work.ranks_per_node == 8 and work.places["a4"] == ("leaf9", "pod-0")
    assert job.spec.gang.ranks(job.placement.replicas) == 13 * 8
    finish(drive)
    drive.wait(3600 * SECOND)
    assert len(checks_of(drive)) == 1
    assert any("13 nodes is well" in line for line in told(drive))


def test_joins_that_do_not_end_are_not_waited_for_for_ever() -> None:
    drive = site(AT_JOIN)
    for number in range(130):
        join(drive, f"a{number}")
        drive.wait(SECOND)
    assert len(names_of(drive, under_way(drive))) == 64  # the policy's most


def test_a_node_that_was_doubted_is_measured_when_it_has_passed_its_own_check() -> None:
    drive = site(AT_JOIN)
    drive.tell(DeviceError(node=3, cause="xid", detail="79"))
    drive.wait(60 * SECOND)
    assert checks_of(drive) == []
    drive.tell(CheckResult(node=3, check="full", passed=True))
    drive.wait(20 * SECOND)
    assert "n3" in str(under_way(drive).placement.reason)


def test_a_node_at_work_is_measured_when_it_is_idle_and_two_nodes_never() -> None:
    drive = site(AT_JOIN, nodes=1)
    join(drive, "a", "b")
    job = drive.submit(gang=msgspec.structs.replace(GANG["gang"], replicas=2))
    drive.wait(60 * SECOND)
    assert checks_of(drive) == []
    drive.tell(Cancel(job=job.id))
    drive.wait(60 * SECOND)
    assert sorted(names_of(drive, under_way(drive))) == ["a", "b", "n0"]


def test_spares_of_the_fleet_are_measured_and_are_spares_again() -> None:
    policy = Policy(fabric_checks=AT_JOIN, spares=SparePolicy(nodes=8))
    drive = Drive(8, policy)
    drive.tell(DeviceError(node=3, cause="xid", detail="79"))
    drive.tell(CheckResult(node=3, check="full", passed=True))
    drive.wait(20 * SECOND)
    assert "n3" in names_of(drive, under_way(drive))
    finish(drive)
    drive.wait(SECOND)
    assert [state(drive, f"n{number}") for number in range(8)] == [NodeState.SPARE] * 8


def test_a_check_gives_way_to_a_gang_that_lost_a_node() -> None:
    drive = site(AT_JOIN, nodes=4)
    job = drive.submit(**GANG)
    drive.run(job)
    join(drive, "a", "b", "c")
    drive.wait(20 * SECOND)
    check = under_way(drive)
    drive.run(check)
    drive.tell(NodeSilent(node=2))
    drive.wait(2 * SECOND)
    assert check.state == "cancelled" and "a" in names_of(drive, job)


def test_nodes_of_another_kind_are_no_peers() -> None:
    drive = site(AT_JOIN)
    join(drive, "a", "b", "c", gpus=4)
    drive.wait(20 * SECOND)
    assert names_of(drive, under_way(drive)) == ["a", "b", "c"]


def test_a_node_without_peers_does_not_keep_nodes_of_another_kind_waiting() -> None:
    drive = site(AT_JOIN)
    join(drive, "alone", gpus=2)
    drive.wait(60 * SECOND)
    join(drive, "a", "b", "c", gpus=4)
    drive.wait(20 * SECOND)
    assert names_of(drive, under_way(drive)) == ["a", "b", "c"]


def test_one_check_alone_accuses_nobody_and_two_in_a_row_drain_a_node() -> None:
    drive = site(AT_JOIN)
    join(drive, "a")
    drive.wait(20 * SECOND)
    finish(drive, "a")
    assert state(drive, "a") is NodeState.HEALTHY
    drive.wait(SECOND)
    finish(drive, "a")
    assert state(drive, "a") is NodeState.DRAINING
    node = drive.core.view.fleet.index["a"]
    assert "60%" in str(drive.core.view.fleet.history[node][-1].reason)
    drive.wait(3600 * SECOND)
    assert len(checks_of(drive)) == 2


def test_a_noisy_reading_is_forgotten_when_the_next_check_finds_the_node_well() -> None:
    drive = site(AT_JOIN)
    join(drive, "a")
    drive.wait(20 * SECOND)
    for _ in range(2):
        finish(drive, "a")
        drive.wait(SECOND)
        finish(drive)
        node = drive.core.view.fleet.index["a"]
        drive.tell(DeviceError(node=node, cause="xid"), SECOND)
        drive.tell(CheckResult(node=node, check="full", passed=True))
        drive.wait(20 * SECOND)
    assert state(drive, "a") is NodeState.HEALTHY
    assert len([each for each in checks_of(drive) if each.ended]) == 4


def test_of_many_slow_nodes_few_are_drained_as_then_the_fabric_is_to_blame() -> None:
    drive = site(AT_JOIN)
    join(drive, "a", "b", "c")
    drive.wait(20 * SECOND)
    finish(drive, "a", "b", "c")
    drive.wait(SECOND)
    finish(drive, "a", "b", "c")
    drained = [name for name in "abc" if state(drive, name) is NodeState.DRAINING]
    assert drained == ["a"]
    assert any("look at the fabric as a whole" in line for line in told(drive))


def test_a_site_may_only_want_to_be_told() -> None:
    drive = site(msgspec.structs.replace(AT_JOIN, drain=False, confirmations=1))
    join(drive, "a")
    drive.wait(20 * SECOND)
    finish(drive, "a")
    assert state(drive, "a") is NodeState.HEALTHY
    assert any("fabric check: node a: 60%" in line for line in told(drive))


@pytest.mark.parametrize(
    "result", ["", "{", '{"findings": 3}', '{"unclear": "too much noise"}', "[" * 5000]
)
def test_a_check_without_a_verdict_is_made_again_later_and_later_still(result: str) -> None:
    drive = site(AT_JOIN)
    join(drive, "a")
    drive.wait(20 * SECOND)
    finish(drive, result=result)
    assert any("was not measured" in line for line in told(drive))
    drive.wait(50 * SECOND)
    assert len(checks_of(drive)) == 1
    drive.wait(20 * SECOND)
    finish(drive, result=result)
    drive.wait(110 * SECOND)
    assert len(checks_of(drive)) == 2
    drive.wait(20 * SECOND)
    assert len(checks_of(drive)) == 3


def test_a_verdict_about_nodes_that_were_not_measured_touches_nobody() -> None:
    drive = site(msgspec.structs.replace(AT_JOIN, confirmations=1, most_nodes=3), nodes=20)
    join(drive, "a")
    drive.wait(20 * SECOND)
    measured = names_of(drive, under_way(drive))
    other = next(f"n{number}" for number in range(20) if f"n{number}" not in measured)
    finish(drive, other, "nobody")
    assert state(drive, other) is NodeState.HEALTHY


def test_a_check_ends_at_its_limit_and_leaves_nothing_reserved() -> None:
    drive = site(AT_JOIN)
    join(drive, "a")
    drive.wait(20 * SECOND)
    job = under_way(drive)
    drive.run(job)
    drive.wait(120 * SECOND)
    assert job.state == "cancelled"
    assert not any(drive.core.view.fleet.held[:9])


def test_a_check_that_loses_a_node_ends() -> None:
    drive = site(AT_JOIN)
    join(drive, "a")
    drive.wait(20 * SECOND)
    job = under_way(drive)
    drive.run(job)
    drive.tell(NodeSilent(node=2))
    drive.wait(5 * SECOND)
    assert job.ended and not any(drive.core.view.fleet.held)
    assert any("was not measured" in line for line in told(drive))


def test_a_controller_that_takes_over_goes_on_with_the_check_under_way() -> None:
    drive = site(AT_JOIN)
    join(drive, "a")
    drive.wait(20 * SECOND)
    drive.run(under_way(drive))
    drive.core = Core.restore(drive.core.snapshot())
    drive.tell(ControllerStarted(epoch=2))
    finish(drive, "a")
    drive.wait(SECOND)
    assert len(checks_of(drive)) == 2
    drive.core = Core.restore(drive.core.snapshot())
    drive.wait(121 * SECOND)
    assert not any(drive.core.view.fleet.held)


def test_a_gang_waits_for_a_check_of_the_nodes_that_it_gets() -> None:
    drive = site(BEFORE)
    job = drive.submit(**GANG)
    assert job.state == "pending"
    check = under_way(drive)
    waits = explain(drive.core.queue, drive.core.view, job.id).reason
    assert "the fabric between its 4 nodes is measured" in str(waits)
    measured = names_of(drive, check)
    finish(drive)
    drive.wait(SECOND)
    assert job.state == "forming" and names_of(drive, job) == measured
    drive.tell(Cancel(job=job.id))
    drive.wait(SECOND)
    again = drive.submit(**GANG)  # what was measured a moment ago is not measured again
    assert again.state == "forming" and len(checks_of(drive)) == 1


def test_a_small_gang_does_not_wait() -> None:
    drive = site(BEFORE)
    job = drive.submit(gang=msgspec.structs.replace(GANG["gang"], replicas=3))
    assert job.state == "forming" and checks_of(drive) == []


def test_a_gang_gets_other_nodes_than_those_found_slow() -> None:
    drive = site(BEFORE)
    job = drive.submit(**GANG)
    bad = names_of(drive, under_way(drive))[1]
    finish(drive, bad)
    drive.wait(SECOND)
    finish(drive, bad)
    drive.wait(SECOND)
    assert state(drive, bad) is NodeState.DRAINING
    if job.state == "pending":
        finish(drive)  # the node that takes its place is measured as well
        drive.wait(SECOND)
    assert job.state == "forming" and bad not in names_of(drive, job)


def test_a_check_that_cannot_end_holds_a_gang_up_for_its_limit_and_no_longer() -> None:
    drive = site(msgspec.structs.replace(BEFORE, limit_ns=30 * SECOND))
    job = drive.submit(**GANG)
    drive.wait(28 * SECOND)
    assert job.state == "pending"
    drive.wait(3 * SECOND)
    assert job.state == "forming" and len(checks_of(drive)) == 1


def test_a_check_that_fails_lets_its_gang_start_at_once_and_the_next_ones_too() -> None:
    drive = site(BEFORE)
    job = drive.submit(**GANG)
    finish(drive, result="")
    drive.wait(SECOND)
    assert job.state == "forming"
    other = drive.submit(**GANG)
    assert other.state == "forming" and len(checks_of(drive)) == 1


def test_nodes_under_a_check_are_nobody_elses_and_a_second_gang_waits_its_turn() -> None:
    drive = site(BEFORE)
    first, second = drive.submit(**GANG), drive.submit(**GANG)
    assert (first.state, second.state) == ("pending", "pending")
    small = drive.submit(gang=msgspec.structs.replace(GANG["gang"], replicas=1))
    assert small.state == "pending"  # all nodes are promised
    finish(drive)
    drive.wait(SECOND)
    assert first.state == "forming" and second.state == "pending"
    finish(drive)
    drive.wait(SECOND)
    assert second.state == "forming"


def test_a_gang_that_is_cancelled_while_it_waits_leaves_nothing_behind() -> None:
    drive = site(BEFORE)
    job = drive.submit(**GANG)
    drive.tell(Cancel(job=job.id))
    finish(drive)
    drive.wait(SECOND)
    assert drive.core.view.fabric_checks.waits == {}
    assert drive.submit(gang=msgspec.structs.replace(GANG["gang"], replicas=8)) is not None
    assert not any(drive.core.queue.promises.by_job.get(number) for number in (job.id,))


def test_the_same_events_lead_to_the_same_checks_by_way_of_a_snapshot() -> None:
    plain, kept = site(AT_JOIN), site(AT_JOIN)
    for drive in (plain, kept):
        join(drive, "a", "b")
        drive.wait(5 * SECOND)
    kept.core = Core.restore(kept.core.snapshot())
    for drive in (plain, kept):
        drive.wait(20 * SECOND)
        finish(drive, "b")
        drive.wait(SECOND)
    assert plain.core.snapshot() == kept.core.snapshot()


def test_a_fleet_without_gpus_is_measured_by_one_rank_a_node() -> None:
    drive = Drive(fleet=fleet_of(3, gpus=0), policy=Policy(fabric_checks=AT_JOIN))
    join(drive, "a", gpus=0)
    drive.wait(20 * SECOND)
    job = under_way(drive)
    assert len(names_of(drive, job)) == 4 == job.spec.gang.ranks(job.placement.replicas)


def test_places_of_very_many_nodes_are_left_out_of_a_program_s_arguments() -> None:
    few = FabricCheckWork(ranks_per_node=8, slower_ppm=1, places={"n": ("l", "p")})
    many = {f"node-{number}": ("leaf", "pod") for number in range(5000)}
    assert msgspec.json.decode(encode_work(few), type=FabricCheckWork) == few
    work = msgspec.json.decode(
        encode_work(msgspec.structs.replace(few, places=many)), type=FabricCheckWork
    )
    assert work.places == {} and work.ranks_per_node == 8
