"""A program starts elsewhere only when what ran on a lost node is known to have ended."""

from __future__ import annotations

import pytest

from phalanx.cluster.jobs.job import ClusterJob, GangShape
from phalanx.cluster.policy import TimeoutPolicy
from phalanx.cluster.protocol.commands import Go, Notify, Stop
from phalanx.cluster.protocol.events import (
    Cancel,
    DrainNode,
    GangDrained,
    GangJoined,
    GangReady,
    GangStuck,
    JobFinished,
    NodeSilent,
    Requeue,
)
from phalanx.cluster.protocol.messages import Holding, Inventory, NodeSeen, ProgramEnded
from phalanx.cluster.protocol.timeouts import derive
from tests.cluster.drive import EXPECTED, SECOND, Drive

ONE = GangShape(slot_gpus=8)
TIMES = derive(TimeoutPolicy(), EXPECTED)


def started(drive: Drive, *, program: bool = True) -> ClusterJob:
    job = drive.submit(gang=ONE, reports_steps=not program)
    drive.run(job)
    drive.wait(60 * SECOND)
    return job


def lose(drive: Drive, job: ClusterJob, *, heard_ns: int) -> int:
    """Its node is lost, and the next generation is ready a moment later; when that is."""
    (node,) = job.placement.nodes
    silent = NodeSilent(node=node, connection_lost=True, broke_ns=drive.now_ns, heard_ns=heard_ns)
    drive.tell(silent)
    drive.settle(job)
    assert job.placement.nodes != (node,)
    drive.tell(GangJoined(job=job.id, generation=job.generation, step=-1), SECOND)
    drive.tell(GangReady(job=job.id, generation=job.generation, step=0), SECOND)
    return drive.now_ns


def gone(drive: Drive) -> list[int]:
    """When gangs were told to go: generations."""
    return [order.generation for order in drive.bodies(Go)]


def test_a_program_waits_until_a_lost_node_has_ended_it() -> None:
    drive = Drive()
    job = started(drive)
    heard = drive.now_ns
    lose(drive, job, heard_ns=heard)
    assert job.state == "forming" and gone(drive) == [1]
    assert "may still run" in str(drive.bodies(Notify)[-1].reason)
    drive.wait(heard + TIMES.silent_ns - 1 - drive.now_ns)
    assert gone(drive) == [1]
    drive.wait(1)
    assert job.state == "running" and gone(drive) == [1, 2]
    assert TIMES.program_lease_ns < TIMES.silent_ns  # so the node has ended it before


def test_a_node_that_was_silent_for_long_enough_is_not_waited_for() -> None:
    drive = Drive()
    job = started(drive)
    lose(drive, job, heard_ns=drive.now_ns - TIMES.silent_ns)
    assert job.state == "running" and gone(drive) == [1, 2]


def test_our_trainer_is_fenced_by_its_generation_and_waits_for_nobody() -> None:
    drive = Drive()
    job = started(drive, program=False)
    lose(drive, job, heard_ns=drive.now_ns)
    assert job.state == "running" and gone(drive) == [1, 2]


def test_a_node_that_is_back_with_the_old_program_has_to_end_it_first() -> None:
    drive = Drive()
    job = started(drive)
    (node,) = job.placement.nodes
    lose(drive, job, heard_ns=drive.now_ns)
    drive.wait(5 * SECOND)
    old = Holding(job.id, 1, "running", 0, -1)
    drive.tell(NodeSeen(node=node, inventory=Inventory(incarnation=1, jobs=(old,))))
    back = drive.now_ns
    drive.wait(back + TIMES.silent_ns - 1 - drive.now_ns)
    assert gone(drive) == [1]
    drive.wait(SECOND)
    assert gone(drive) == [1, 2] and job.state == "running"


def test_a_node_that_was_lost_before_anything_started_there_is_not_waited_for() -> None:
    drive = Drive()
    job = drive.submit(gang=ONE, reports_steps=False)
    lose(drive, job, heard_ns=drive.now_ns)
    assert job.state == "running" and gone(drive) == [2]


def requeued(drive: Drive, job: ClusterJob) -> int:
    """It leaves its node by an order to stop, and is ready on another; the node that it left."""
    (node,) = job.placement.nodes
    drive.tell(Requeue(job=job.id))
    drive.tell(GangStuck(job=job.id, generation=1, phase="drain", nodes=(node,)), SECOND)
    stop = drive.bodies(Stop)[-1]
    assert stop.confirm and stop.generation == 1
    drive.tell(DrainNode(node=node, request="r"), SECOND)
    drive.wait(SECOND)
    assert job.placement.nodes != (node,)
    drive.tell(GangJoined(job=job.id, generation=job.generation, step=-1), SECOND)
    drive.tell(GangReady(job=job.id, generation=job.generation, step=0), SECOND)
    return node


def test_a_requeued_program_waits_for_a_node_that_does_not_confirm_its_end() -> None:
    drive = Drive()
    job = started(drive)
    requeued(drive, job)
    generation, until = next(iter(job.fenced.values()))
    assert job.state == "forming" and gone(drive) == [1] and generation == 1
    drive.wait(until - 1 - drive.now_ns)
    assert gone(drive) == [1]
    drive.wait(1)
    assert gone(drive) == [1, job.generation] and job.state == "running" and not job.fenced


def test_a_requeued_program_goes_at_once_when_its_end_is_confirmed() -> None:
    drive = Drive()
    job = started(drive)
    node = requeued(drive, job)
    drive.tell(ProgramEnded(node=node, job=job.id, generation=0), SECOND)
    assert gone(drive) == [1]  # of an end before it ran there
    drive.tell(ProgramEnded(node=node, job=job.id, generation=1))
    assert gone(drive) == [1, job.generation] and job.state == "running"


def test_an_end_that_is_confirmed_before_the_gang_is_ready_is_not_waited_for() -> None:
    drive = Drive()
    job = started(drive)
    (node,) = job.placement.nodes
    drive.tell(Requeue(job=job.id))
    drive.tell(GangDrained(job=job.id, generation=1, step=0, durable=False), SECOND)
    drive.tell(ProgramEnded(node=node, job=job.id, generation=1))
    drive.wait(SECOND)
    drive.tell(GangJoined(job=job.id, generation=2, step=-1), SECOND)
    drive.tell(GangReady(job=job.id, generation=2, step=0), SECOND)
    assert gone(drive) == [1, 2]


def test_a_node_that_joins_again_has_ended_what_ran_there() -> None:
    drive = Drive(nodes=1)
    job = started(drive)
    drive.tell(Requeue(job=job.id))
    drive.tell(GangDrained(job=job.id, generation=1, step=0, durable=False), SECOND)
    drive.wait(SECOND)
    assert job.fenced
    drive.tell(GangJoined(job=job.id, generation=2, step=-1), SECOND)
    drive.tell(GangReady(job=job.id, generation=2, step=0), SECOND)
    assert gone(drive) == [1, 2]


def test_a_program_that_is_cancelled_and_submitted_again_waits_for_the_first() -> None:
    drive = Drive()
    first = started(drive)
    (node,) = first.placement.nodes
    drive.tell(Cancel(job=first.id))
    drive.tell(GangStuck(job=first.id, generation=1, phase="drain", nodes=(node,)), SECOND)
    assert first.state == "cancelled" and first.fenced
    again = drive.submit(gang=ONE, reports_steps=False)
    other = drive.submit(gang=ONE, reports_steps=False, name="another")
    for job in (again, other):
        drive.tell(GangJoined(job=job.id, generation=1, step=-1), SECOND)
        drive.tell(GangReady(job=job.id, generation=1, step=0), SECOND)
    assert (again.state, other.state) == ("forming", "running")
    drive.tell(ProgramEnded(node=node, job=first.id, generation=1))
    assert again.state == "running"


@pytest.mark.parametrize("down_ns", [10 * SECOND, 2 * TIMES.silent_ns])
def test_while_no_controller_runs_programs_run_on_so_their_end_is_awaited_anew(
    down_ns: int,
) -> None:
    drive = Drive()
    job = started(drive)
    requeued(drive, job)
    drive.take_over(down_ns)
    back = drive.now_ns
    drive.wait(TIMES.silent_ns - 1)
    assert gone(drive) == [1]
    drive.wait(1)
    assert gone(drive) == [1, job.generation] and drive.now_ns == back + TIMES.silent_ns


def test_our_trainer_and_a_program_that_is_done_are_not_asked_to_confirm() -> None:
    drive = Drive()
    ours, program = started(drive, program=False), started(drive)
    drive.tell(JobFinished(job=program.id, generation=1, step=0))
    drive.tell(Requeue(job=ours.id))
    drive.tell(GangDrained(job=ours.id, generation=1, step=0, durable=True), SECOND)
    assert [order.confirm for order in drive.bodies(Stop)] == [False, False]
