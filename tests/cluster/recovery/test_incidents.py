"""A program's rank that ends with an error: its own failure, or only a sign of a lost node."""

from __future__ import annotations

import pytest

from phalanx.cluster.jobs.job import ClusterJob, GangShape
from phalanx.cluster.node import NodeState
from phalanx.cluster.policy import HealthPolicy, Policy
from phalanx.cluster.protocol.commands import Abort
from phalanx.cluster.protocol.events import GangJoined, GangReady, NodeSilent
from phalanx.cluster.protocol.messages import Inventory, NodeSeen, WorkerExited
from tests.cluster.drive import SECOND, Drive

MINUTE = 60 * SECOND


def program(retries: int = 0, policy: Policy | None = None) -> tuple[Drive, ClusterJob]:
    """A program on two nodes that has handed over a snapshot of step 150."""
    drive = Drive(policy=policy)
    return drive, drive.running(reports_steps=False, retries=retries)


def fails(drive: Drive, job: ClusterJob, slot: int = 0, cause: str = "user_error") -> None:
    """A rank says that the connection to a peer is gone, as any error is said."""
    node = job.placement.nodes[slot]
    detail = "RuntimeError: Connection closed by peer"
    drive.tell(
        WorkerExited(
            job=job.id,
            generation=job.generation,
            node=node,
            rank=8 * slot,
            cause=cause,
            step=job.step,
            detail=detail,
        )
    )


def runs_again(drive: Drive, job: ClusterJob) -> None:
    """It forms, and starts when nothing of it can run on the lost node any more."""
    joined = GangJoined(job=job.id, generation=job.generation, step=job.committed)
    drive.tell(joined, SECOND)
    drive.tell(GangReady(job=job.id, generation=job.generation, step=job.gang.restored), SECOND)
    drive.wait(MINUTE)
    assert job.state == "running"


@pytest.mark.parametrize("cause", ["user_error", "software_bug"])
def test_a_lost_node_never_counts_against_a_program(cause):
    drive, job = program(policy=Policy(health=HealthPolicy(breaker_least_nodes=8)))
    for _ in range(6):  # no snapshot between them
        fails(drive, job, cause=cause)
        (abort,) = drive.bodies(Abort)[-1:]
        assert abort.answer_ns > drive.now_ns, "every node has to answer"
        drive.tell(NodeSilent(node=job.placement.nodes[1]), abort.answer_ns - drive.now_ns)
        drive.settle(job)
        assert drive.last_form().reason.facts["cause"] == "node_silent"
        runs_again(drive, job)
    assert (job.retries_used, job.failures_there, job.evidence) == (0, 0, ())


def test_a_programs_error_counts_once_every_node_has_answered():
    drive, job = program(retries=1)
    fails(drive, job)
    fails(drive, job, slot=1)  # by the same fault
    assert job.retries_used == 0
    drive.settle(job)
    assert job.retries_used == 1 and drive.last_form().reason.facts["cause"] == "user_error"
    assert "Connection closed by peer" in job.evidence[-1]
    drive.run(job)
    fails(drive, job)
    drive.settle(job)
    drive.save_and_leave(job)
    assert job.state == "failed" and "1 retries" in str(job.why)


def test_a_long_healthy_time_counts_for_a_program_whose_nodes_are_asked():
    drive = Drive()
    job = drive.submit(reports_steps=False, retries=1)
    drive.run(job)
    for _ in range(6):  # the same error at "step 0" each time
        drive.wait(60 * MINUTE)
        fails(drive, job)
        drive.settle(job)
        drive.run(job)
    assert job.state == "running" and job.retries_used == 1


def test_an_agent_that_came_back_without_its_rank_is_why_the_others_failed():
    drive, job = program()
    fails(drive, job)
    drive.tell(NodeSeen(node=job.placement.nodes[1], inventory=Inventory(2, (), ())), SECOND)
    drive.settle(job)
    assert drive.last_form().reason.facts["cause"] == "agent_restarted"
    assert job.retries_used == 0


def test_a_silent_node_that_the_breaker_keeps_does_not_count_either():
    drive, job = program(policy=Policy(health=HealthPolicy(breaker_least_nodes=0)))
    fails(drive, job)
    lost = job.placement.nodes[1]
    drive.tell(NodeSilent(node=lost), SECOND)
    assert drive.core.view.fleet.state(lost) is NodeState.SUSPECT
    drive.settle(job)
    assert job.retries_used == 0 and not job.ended


def test_a_program_on_one_node_can_blame_nobody_else():
    drive = Drive()
    job = drive.running(gang=GangShape(slot_gpus=8), reports_steps=False, retries=3)
    fails(drive, job)
    assert job.retries_used == 1 and not any(each.answer_ns for each in drive.bodies(Abort))
