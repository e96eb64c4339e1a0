"""A known node that comes back as another machine: told, taken over, and never lied about."""

from __future__ import annotations

import pytest
from msgspec import structs

from phalanx.cluster.core import Core
from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.jobs.job import ClusterJob, GangShape
from phalanx.cluster.node import Node, NodeState
from phalanx.cluster.protocol.commands import Notify
from phalanx.cluster.protocol.events import (
    GangDrained,
    JobFinished,
    NodeDescribed,
    NodeJoined,
    NodeSilent,
    Requeue,
)
from phalanx.cluster.protocol.messages import CheckResult, Holding, Inventory
from tests.cluster.drive import SECOND, Drive
from tests.cluster.invariants import check

NODE = GangShape(replicas=1, tensor=8, slot_gpus=8, slot_cpus=8)
HALF = GangShape(replicas=1, tensor=4, slot_gpus=4, slot_cpus=8)


def comes_back(drive: Drive, node: int, job: ClusterJob | None = None, **fields: object) -> None:
    new = structs.replace(drive.core.view.fleet.nodes[node], **fields)
    jobs = ()
    if job is not None:
        jobs = (Holding(job.id, job.generation, "running", job.step, job.step),)
    drive.tell(NodeJoined(node=new, inventory=Inventory(2, jobs)))


def told(drive: Drive) -> list[str]:
    return [str(body.reason) for body in drive.bodies(Notify) if body.reason.code == "node_changed"]


def passes(drive: Drive, node: int) -> None:
    drive.tell(CheckResult(node=node, check="full", passed=True), SECOND)
    drive.wait(SECOND)


def whole(drive: Drive) -> None:
    """The core is sound, and the same after a snapshot."""
    check(drive.core)
    kept = drive.core.snapshot()
    again = Core.restore(kept)
    assert again.snapshot() == kept
    assert again.view.fleet.classes == drive.core.view.fleet.classes
    assert again.view.fleet.places == drive.core.view.fleet.places
    assert again.view.fleet.idle_gpus == drive.core.view.fleet.idle_gpus


def test_a_gang_moves_away_from_a_node_that_lost_gpus() -> None:
    drive = Drive(3)
    job = drive.running(gang=NODE)
    (node,) = job.placement.nodes
    comes_back(drive, node, job, gpus=4)
    (sentence,) = told(drive)
    assert sentence == f"n{node} is not what it was: gpus 8 -> 4"
    assert drive.core.view.fleet.state(node) is NodeState.SUSPECT
    drive.wait(5 * SECOND)
    assert job.placement.nodes != (node,) and job.state == "forming"
    drive.run(job)
    assert drive.core.view.fleet.nodes[node].gpus == 4 and drive.core.view.fleet.total_gpus == 20
    passes(drive, node)
    assert drive.core.view.fleet.state(node) is NodeState.HEALTHY
    whole(drive)
    (third,) = {0, 1, 2} - {node, *job.placement.nodes}
    drive.running(gang=NODE)
    last = drive.submit(gang=NODE)
    assert last.placement is None  # four GPUs are left, and nobody is told otherwise
    assert drive.submit(gang=HALF).placement.nodes == (node,)
    assert drive.core.view.fleet.held[third]


def test_a_job_that_still_fits_goes_on_and_the_node_is_renewed_after_it() -> None:
    drive = Drive(2)
    job = drive.running(gang=HALF)
    (node,) = job.placement.nodes
    comes_back(drive, node, job, gpus=4)
    drive.wait(5 * SECOND)
    assert job.state == "running" and job.generation == 1
    assert drive.core.view.fleet.nodes[node].gpus == 8  # until it is empty
    assert drive.core.view.fleet.state(node) is NodeState.SUSPECT  # and gets nothing new
    whole(drive)
    drive.tell(JobFinished(job=job.id, generation=1, step=job.step))
    drive.wait(SECOND)
    assert drive.core.view.fleet.nodes[node].gpus == 4
    passes(drive, node)
    whole(drive)


@pytest.mark.parametrize(
    "fields", [{"kind": "a100"}, {"features": ()}, {"partition": "other"}, {"cpus": 4}]
)
def test_a_job_leaves_a_node_that_no_longer_is_what_it_asked_for(fields: dict[str, object]) -> None:
    drive = Drive(2)
    job = drive.running(gang=NODE, constraint="h100 & nvlink", partition="default")
    (node,) = job.placement.nodes
    comes_back(drive, node, job, **fields)
    drive.wait(5 * SECOND)
    assert job.placement.nodes == (1 - node,)
    whole(drive)


def test_a_little_less_memory_after_a_boot_disturbs_nobody() -> None:
    drive = Drive(2)
    gang = GangShape(replicas=1, tensor=8, slot_gpus=8, whole_nodes=True)
    job = drive.running(gang=gang)
    (node,) = job.placement.nodes
    before = drive.core.view.fleet.nodes[node].memory_bytes
    comes_back(drive, node, job, memory_bytes=before - 4096)
    drive.wait(SECOND)
    assert job.state == "running" and told(drive)
    assert drive.core.view.fleet.state(node) is NodeState.HEALTHY
    drive.tell(Requeue(job=job.id))
    drive.tell(GangDrained(job=job.id, generation=1, step=job.step), SECOND)
    drive.wait(SECOND)
    comes_back(drive, 1 - node, memory_bytes=before - 4096)
    whole(drive)


def test_a_dead_node_that_comes_back_smaller_is_tested_and_counted_as_it_is() -> None:
    drive = Drive(2)
    drive.tell(NodeSilent(node=1))
    comes_back(drive, 1, gpus=6, leaf="elsewhere")
    assert drive.core.view.fleet.state(1) is NodeState.SUSPECT
    passes(drive, 1)
    assert drive.core.view.fleet.total_gpus == 14 and drive.core.view.fleet.columns.leaf[1] == 1
    whole(drive)


def test_a_spare_that_lost_gpus_stands_by_no_more() -> None:
    drive = Drive(3)
    job = drive.running(gang=NODE, spares=1)
    (spare,) = job.placement.spares
    comes_back(drive, spare, gpus=2)
    drive.wait(SECOND)
    assert spare not in job.placement.spares
    drive.core.ledger.check(drive.core.view)
    whole(drive)


def test_nonsense_and_echoes_change_nothing() -> None:
    drive = Drive(1)
    node = drive.core.view.fleet.nodes[0]
    comes_back(drive, 0)
    assert not told(drive)
    drive.tell(NodeJoined(node=structs.replace(node, gpus=99), inventory=Inventory(3)))
    drive.tell(NodeJoined(node=structs.replace(node, gpus=2), inventory=Inventory(1)))  # an old one
    assert drive.core.view.fleet.nodes[0] == node and not told(drive)


def test_a_renewed_fleet_is_the_one_that_would_have_been_made_so() -> None:
    drive = Drive(4)
    fleet = drive.core.view.fleet
    for number, fields in enumerate(({"gpus": 2}, {"kind": "a100"}, {"pod": "x"}, {"rails": 2})):
        fleet.renew(number, structs.replace(fleet.nodes[number], **fields))
    made = Fleet(fleet.nodes)
    assert made.classes == fleet.classes and made.places == fleet.places
    for name in ("node_class", "free_mask", "free_gpus", "leaf", "pod", "gpus"):
        assert (getattr(made.columns, name) == getattr(fleet.columns, name)).all()
    assert made.idle_gpus == fleet.idle_gpus and made.total_gpus == fleet.total_gpus


def describes(drive: Drive, node: int, **fields: object) -> None:
    new = structs.replace(drive.core.view.fleet.nodes[node], **fields)
    drive.tell(NodeDescribed(node=node, described=new))


def anew(drive: Drive) -> list[str]:
    found = [body.reason for body in drive.bodies(Notify) if body.reason.code == "node_described"]
    return [str(reason) for reason in found]


def test_a_node_that_stands_elsewhere_goes_on_with_its_job() -> None:
    drive = Drive(4)
    job = drive.running(gang=NODE)
    (node,) = job.placement.nodes
    places = {"leaf": "x", "pod": "y", "rack": "r", "power": "p", "switch": "s", "domain": "d"}
    describes(drive, node, rails=4, **places)
    drive.wait(5 * SECOND)
    fleet = drive.core.view.fleet
    assert job.state == "running" and job.generation == 1
    assert fleet.state(node) is NodeState.HEALTHY and node not in drive.core._ctx.health.renewed
    assert fleet.nodes[node].rails == 4 and fleet.nodes[node].leaf == "x"
    assert fleet.places["leaf"][fleet.columns.leaf[node]] == "x"
    assert anew(drive)[0].startswith(f"n{node} describes itself anew: ") and not told(drive)
    assert not drive.core._ctx.health.incidents.get(node)
    whole(drive)


def test_the_kind_of_a_node_that_had_none_is_learned_while_it_works() -> None:
    drive = Drive(fleet=Fleet([Node(name="n0"), Node(name="n1")]))
    job = drive.running(gang=NODE)
    (node,) = job.placement.nodes
    describes(drive, node, kind="h100", features=("nvlink",))
    assert job.state == "running" and drive.core.view.fleet.state(node) is NodeState.HEALTHY
    other = drive.submit(gang=HALF, constraint="h100")
    assert other.placement is None  # known by now, and taken
    describes(drive, 1 - node, kind="h100")
    drive.wait(SECOND)
    assert other.placement.nodes == (1 - node,)
    whole(drive)


def test_a_kind_that_becomes_another_is_another_machine() -> None:
    drive = Drive(2)
    job = drive.running(gang=NODE)
    (node,) = job.placement.nodes
    describes(drive, node, kind="a100", leaf="x")
    fleet = drive.core.view.fleet
    assert fleet.nodes[node].leaf == "x" and fleet.nodes[node].kind == "h100"  # until it is empty
    assert fleet.state(node) is NodeState.SUSPECT and job.state == "running"
    whole(drive)
    drive.tell(JobFinished(job=job.id, generation=1, step=job.step))
    drive.wait(SECOND)
    assert fleet.nodes[node].kind == "a100"
    whole(drive)


def test_fewer_gpus_of_a_node_that_works_move_what_does_not_fit() -> None:
    drive = Drive(3)
    job = drive.running(gang=NODE)
    (node,) = job.placement.nodes
    describes(drive, node, gpus=7)
    assert told(drive) == [f"n{node} is not what it was: gpus 8 -> 7"]
    drive.wait(5 * SECOND)
    assert job.placement.nodes != (node,)
    drive.run(job)
    passes(drive, node)
    assert drive.core.view.fleet.nodes[node].gpus == 7
    whole(drive)


def test_more_gpus_than_before_wait_until_the_node_is_empty() -> None:
    drive = Drive(2)
    job = drive.running(gang=NODE)
    (node,) = job.placement.nodes
    describes(drive, node, gpus=10)
    drive.wait(SECOND)
    assert job.state == "running" and drive.core.view.fleet.nodes[node].gpus == 8
    whole(drive)


def test_a_new_partition_disturbs_nobody_who_did_not_ask_for_the_old_one() -> None:
    drive = Drive(2)
    job = drive.running(gang=NODE)
    (node,) = job.placement.nodes
    describes(drive, node, partition="other")
    drive.wait(SECOND)
    assert job.state == "running" and drive.core.view.fleet.state(node) is NodeState.HEALTHY
    assert drive.core.view.fleet.nodes[node].partition == "other"
    whole(drive)


def test_dead_rails_that_are_there_no_more_are_forgotten() -> None:
    drive = Drive(1)
    drive.core.view.fleet.set_rails_down(0, 0b1000_0001)
    describes(drive, 0, rails=4)
    assert drive.core.view.fleet.rails_down(0) == 1


def test_what_cannot_be_is_refused() -> None:
    drive = Drive(2)
    before = list(drive.core.view.fleet.nodes)
    describes(drive, 0, kind="H100 80GB")
    describes(drive, 0, name="n1")
    describes(drive, 0, rails=64)
    drive.tell(NodeDescribed(node=7, described=before[0]))
    assert drive.core.view.fleet.nodes == before
    assert len([1 for body in drive.bodies(Notify) if body.reason.code == "bad_node"]) == 3


def test_a_whole_fleet_that_describes_itself_is_numbered_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet([Node(name=f"n{number}") for number in range(600)])
    with monkeypatch.context() as patch:
        patch.setattr(Fleet, "_number_anew", lambda fleet: pytest.fail("before anybody looks"))
        for number, node in enumerate(list(fleet.nodes)):
            fleet.renew(number, structs.replace(node, leaf=f"l{number // 16}", kind="h100"))
    assert fleet.places["leaf"] == [f"l{number}" for number in range(38)]
    again = Fleet(fleet.nodes)
    assert (again.columns.leaf == fleet.columns.leaf).all() and again.classes == fleet.classes
