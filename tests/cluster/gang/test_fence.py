"""A program starts elsewhere only when what ran on a lost node is known to have ended."""

from __future__ import annotations

from phalanx.cluster.jobs.job import GangShape, Job
from phalanx.cluster.policy import TimeoutPolicy
from phalanx.cluster.protocol.commands import Go, Notify
from phalanx.cluster.protocol.events import GangJoined, GangReady, NodeSilent
from phalanx.cluster.protocol.messages import Holding, Inventory, NodeSeen
from phalanx.cluster.protocol.timeouts import derive
from tests.cluster.drive import EXPECTED, SECOND, Drive

ONE = GangShape(slot_gpus=8)
TIMES = derive(TimeoutPolicy(), EXPECTED)


def started(drive: Drive, *, program: bool = True) -> Job:
    job = drive.submit(gang=ONE, reports_steps=not program)
    drive.run(job)
    drive.wait(60 * SECOND)
    return job


def lose(drive: Drive, job: Job, *, heard_ns: int) -> int:
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
