"""A program that is cancelled is asked to go, and has a while for that."""

from __future__ import annotations

import pytest

from phalanx.cluster.jobs.job import ClusterJob, GangShape
from phalanx.cluster.policy import Policy, RecoveryPolicy
from phalanx.cluster.protocol.commands import Accept, Drain, Stop
from phalanx.cluster.protocol.events import Cancel, GangDrained, JobFinished, NodeSilent
from phalanx.cluster.protocol.messages import WorkerExited
from tests.cluster.drive import SECOND, Drive

ONE = GangShape(slot_gpus=8)


def cancelled(drive: Drive) -> ClusterJob:
    """A program that runs, and was cancelled just now."""
    job = drive.submit(gang=ONE, reports_steps=False)
    drive.run(job)
    drive.tell(Cancel(job=job.id, request="r"), SECOND)
    return job


def test_it_is_asked_first_and_ends_when_it_has_gone() -> None:
    drive = Drive()
    job = cancelled(drive)
    assert "SIGTERM" in str(drive.bodies(Accept)[-1].reason)
    assert job.state == "draining" and not drive.bodies(Stop)
    assert drive.bodies(Drain)[-1].deadline_ns == drive.now_ns + 30 * SECOND
    drive.tell(GangDrained(job=job.id, generation=1, step=0, durable=False), SECOND)
    assert job.state == "cancelled" and job.placement is None


def test_one_that_does_not_go_is_ended_when_its_grace_is_over() -> None:
    drive = Drive()
    job = cancelled(drive)
    drive.wait(29 * SECOND)
    assert job.state == "draining"
    drive.wait(3 * SECOND)
    assert job.state == "cancelled" and len(drive.bodies(Stop)) == 1


def test_cancelled_again_it_ends_at_once() -> None:
    drive = Drive()
    job = cancelled(drive)
    drive.tell(Cancel(job=job.id, request="again"))
    assert job.state == "cancelled" and drive.bodies(Stop)


@pytest.mark.parametrize("how", ["exit", "node"])
def test_it_is_never_started_again(how: str) -> None:
    drive = Drive()
    job = cancelled(drive)
    (node,) = job.placement.nodes
    if how == "exit":  # it minds the signal, and ends with an error
        left = WorkerExited(job=job.id, generation=1, node=node, rank=0, cause="user_error")
        drive.tell(left)
    else:
        drive.tell(NodeSilent(node=node, connection_lost=True, broke_ns=drive.now_ns))
    assert job.state == "cancelled" and job.generation == 1


def test_one_that_does_its_last_step_meanwhile_is_cancelled_or_done_but_not_left_over() -> None:
    drive = Drive()
    job = cancelled(drive)
    drive.tell(JobFinished(job=job.id, generation=1, step=0))
    assert job.ended and job.placement is None


def test_without_a_grace_it_ends_at_once() -> None:
    drive = Drive(policy=Policy(recovery=RecoveryPolicy(cancel_grace_ns=0)))
    assert cancelled(drive).state == "cancelled"
