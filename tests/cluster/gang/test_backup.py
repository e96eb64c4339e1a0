"""A gang on one node: a spare keeps its snapshots, and takes its place with them."""

from __future__ import annotations

import pytest

from phalanx.cluster.causes import Cause
from phalanx.cluster.gang.losses import in_memory
from phalanx.cluster.jobs.job import ClusterJob, Expected, GangShape
from phalanx.cluster.protocol.commands import Form, Restore, Stop
from phalanx.cluster.protocol.events import GangJoined, NodeSilent, Requeue
from phalanx.cluster.protocol.messages import Inventory, NodeSeen, WorkerExited
from tests.cluster.drive import SECOND, Drive

ONE = GangShape(slot_gpus=8)
STEPS = 150  # of which the last 50 are in no checkpoint


def running(drive: Drive, spares: int = 1) -> ClusterJob:
    return drive.running(STEPS, gang=ONE, spares=spares)


def test_the_first_spare_of_a_gang_on_one_node_is_told_to_keep_its_snapshots() -> None:
    drive = Drive()
    job = running(drive, spares=2)
    assert drive.last_form().backup == job.gang.backup == job.placement.spares[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"spares": 0},
        {"gang": GangShape(replicas=2, tensor=8, slot_gpus=8)},
        {"expected": Expected(snapshot_steps=0)},
    ],
    ids=["no spare", "two nodes", "no snapshots"],
)
def test_without_a_spare_with_a_second_node_or_without_snapshots_none_is(fields: dict) -> None:
    drive = Drive()
    drive.submit(**{"gang": ONE, "spares": 1, **fields})
    assert drive.last_form().backup == -1


def test_the_spare_of_a_program_on_one_node_keeps_what_it_hands_over() -> None:
    drive = Drive()
    drive.submit(gang=ONE, spares=1, reports_steps=False)
    form = drive.last_form()
    assert form.backup == form.spares[0]


def test_the_spare_that_keeps_snapshots_is_told_what_the_next_generation_goes_on_from() -> None:
    drive = Drive()
    job = running(drive, spares=2)
    (node,), (keeps, _) = job.placement.nodes, job.placement.spares
    exited = WorkerExited(
        job=job.id, generation=1, node=node, rank=0, step=STEPS, cause=Cause.WORKER_KILLED
    )
    drive.tell(exited, SECOND)
    drive.settle(job)
    drive.run(job)
    orders = [each for each in drive.sent if isinstance(each.body, Restore)]
    assert [each.target for each in orders] == [(node,), (keeps,)] * 2
    assert orders[2].body == orders[3].body and orders[3].body.step == STEPS


def test_the_spare_that_has_them_takes_the_place_of_a_lost_node_and_no_step_is_lost() -> None:
    drive = Drive()
    job = running(drive, spares=2)
    (node,), (keeps, other) = job.placement.nodes, job.placement.spares
    drive.tell(NodeSilent(node=node), SECOND)
    drive.settle(job)
    form = drive.last_form()
    assert (form.nodes, form.spares, form.backup) == ((keeps,), (other,), other)
    assert (form.kept_nodes, form.kept_backup) == ((node,), keeps)
    drive.run(job)
    assert (drive.last_restore().source, drive.last_restore().step) == ("peer", STEPS)
    assert job.lost_steps == 0 and job.gang.backup == other


def test_when_both_are_lost_the_checkpoint_is_what_is_left_and_it_is_said() -> None:
    drive = Drive()
    job = running(drive)
    (node,), (spare,) = job.placement.nodes, job.placement.spares
    drive.tell(NodeSilent(node=node), SECOND)
    drive.tell(NodeSilent(node=spare))
    drive.settle(job)
    assert not in_memory(job.gang)
    drive.run(job, step=-1)
    assert drive.last_restore().step == 100 and job.lost_steps == STEPS - 100


def test_a_spare_that_comes_later_keeps_nothing_before_the_next_generation() -> None:
    drive = Drive()
    job = running(drive)
    (spare,) = job.placement.spares
    drive.tell(NodeSilent(node=spare), SECOND)
    drive.wait(60 * SECOND)
    (later,) = job.placement.spares
    assert later != spare and drive.last_form().spares == (later,)
    assert drive.last_form().backup == -1
    assert not in_memory(job.gang, job.placement.nodes)


def test_a_backup_that_joins_without_them_is_no_backup() -> None:
    drive = Drive()
    job = running(drive)
    drive.tell(NodeSilent(node=job.placement.nodes[0]), SECOND)
    drive.settle(job)
    (node,) = job.placement.nodes
    empty = GangJoined(job=job.id, generation=job.generation, step=-1, empty=(node,))
    drive.tell(empty, SECOND)
    assert job.gang.lost[node] == "empty" and drive.last_restore().step == 100


def test_a_spare_whose_agent_is_new_stands_by_again_with_what_its_keeper_has() -> None:
    drive = Drive()
    job = running(drive)
    (spare,) = job.placement.spares
    seen = NodeSeen(node=spare, inventory=Inventory(2, (), ((job.id, STEPS),)))
    (form,) = [each.body for each in drive.tell(seen) if each.target == (spare,)]
    assert isinstance(form, Form) and form.backup == spare and not drive.bodies(Stop)


def test_a_job_that_leaves_keeps_nothing_on_a_spare() -> None:
    drive = Drive(2)
    job = running(drive)
    drive.tell(NodeSilent(node=job.placement.nodes[0]), SECOND)
    drive.tell(Requeue(job=job.id))
    drive.wait(60 * SECOND)
    assert job.kept is None
