"""Committed steps that are gone are said: all of them, once, with the reason."""

from __future__ import annotations

import pytest

from phalanx.cluster.core import Core
from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.ledger.report import report
from phalanx.cluster.policy import Policy, RecoveryPolicy
from phalanx.cluster.protocol.commands import Abort, Command, Drain, Notify, Stop
from phalanx.cluster.protocol.events import (
    Cancel,
    Corruption,
    GangDrained,
    GangJoined,
    GangReady,
    GangStopped,
    NodeSilent,
    Progress,
    Requeue,
)
from phalanx.cluster.protocol.messages import LastSteps, RestoreFailed, WorkerExited
from tests.cluster.drive import SECOND, Drive
from tests.cluster.protocol.test_gather import WHY, form, running, steps

SAID = ("given_up", "lost_steps")


def told(drive: Drive) -> list[tuple[str, int, int]]:
    notes = [note.reason for note in drive.bodies(Notify) if note.reason.code in SAID]
    return [(each.code, each.facts["first"], each.facts["last"]) for each in notes]


def killed(drive: Drive, job: ClusterJob, step: int = 160) -> None:
    node = job.placement.nodes[0]
    exited = WorkerExited(
        job=job.id, generation=job.generation, node=node, rank=0, cause="worker_killed", step=step
    )
    drive.tell(exited)


def joins(drive: Drive, job: ClusterJob, step: int) -> None:
    """The survivors say how far they were, and join."""
    drive.wait(SECOND)
    fact = Progress(
        job=job.id,
        generation=job.generation,
        step=step,
        committed=step,
        durable=0,
        at_ns=drive.now_ns,
    )
    drive.tell(fact)
    drive.tell(GangJoined(job=job.id, generation=job.generation, step=step), SECOND)


def ready(drive: Drive, job: ClusterJob) -> None:
    drive.tell(GangReady(job=job.id, generation=job.generation, step=job.gang.restored), SECOND)
    assert job.state == "running"


def buddies_die(drive: Drive, job: ClusterJob) -> str:
    """Both nodes of a job of two slots, with all that they kept; their names."""
    nodes = job.placement.nodes
    for node in nodes:
        drive.tell(NodeSilent(node=node, connection_lost=True))
    return ", ".join(drive.core.view.fleet.nodes[node].name for node in sorted(nodes))


def test_steps_that_went_with_both_copies_are_said_with_the_nodes_that_kept_them():
    drive = Drive()
    job = drive.running(150)  # its newest checkpoint is of step 100
    gone = buddies_die(drive, job)
    drive.wait(SECOND)
    drive.tell(GangJoined(job=job.id, generation=2, step=-1), SECOND)
    assert told(drive) == []  # not before it is sure
    ready(drive, job)
    assert told(drive) == [("given_up", 101, 150)]
    notes = [each.reason for each in drive.bodies(Notify) if each.reason.code != "failure_rate"]
    assert str(notes[-1]) == (
        f"50 committed steps (101 to 150) are lost, and are made again: {gone} went with what they "
        "kept in memory, and nobody has another copy"
    )
    assert job.why.code == "recovered_with_loss" and "50 committed steps back" in str(job.why)
    assert (job.lost_steps, job.losses[-1].first, job.losses[-1].last) == (50, 101, 150)
    share = report(drive.core.ledger, drive.core.view.policy.price).jobs[job.id]
    assert share.lost_steps == 50


def test_steps_that_no_report_spoke_of_yet_are_counted_by_what_survivors_kept():
    drive = Drive()
    job = drive.running(150)
    killed(drive, job)
    joins(drive, job, 158)  # the last report was of step 150
    for source in ("peer", "disk"):
        refused = RestoreFailed(
            job=job.id, generation=2, node=job.placement.nodes[0], source=source, step=158,
            detail="no keeper has it",
        )  # fmt: skip
        drive.tell(refused)
    assert job.gang.restored == 100
    ready(drive, job)
    assert told(drive) == [("given_up", 101, 158)]
    assert "cannot be restored (no keeper has it)" in str(drive.bodies(Notify)[-1].reason)


def test_a_recovery_that_loses_no_committed_step_says_nothing_of_the_kind():
    drive = Drive()
    job = drive.running(150)
    killed(drive, job)  # step 160 was made, and only 158 is safe everywhere
    joins(drive, job, 158)
    ready(drive, job)
    assert told(drive) == [] and job.why.code == "recovered" and job.lost_steps == 0


def test_an_older_step_in_memory_than_was_committed_is_a_loss_too():
    drive = Drive()
    job = drive.running(150)
    killed(drive, job)
    drive.wait(SECOND)
    drive.tell(GangJoined(job=job.id, generation=2, step=145), SECOND)
    ready(drive, job)
    assert told(drive) == [("given_up", 146, 150)]
    assert "no later step in common" in str(drive.bodies(Notify)[-1].reason)


def test_nodes_that_hold_no_step_in_common_still_tell_how_far_they_were():
    drive = Drive()
    job = drive.running(150)
    killed(drive, job)
    drive.wait(SECOND)
    drive.tell(GangJoined(job=job.id, generation=2, step=-1, newest=158), SECOND)
    ready(drive, job)
    assert told(drive) == [("given_up", 101, 158)]


def test_steps_that_are_taken_back_on_purpose_are_not_lost():
    drive = Drive()
    job = drive.running(150)
    node = job.placement.nodes[0]
    drive.tell(
        Corruption(job=job.id, generation=1, step=141, clean_step=140, nodes=(node,), claims=())
    )
    drive.wait(SECOND)
    drive.tell(GangJoined(job=job.id, generation=2, step=150), SECOND)
    ready(drive, job)
    assert job.gang.restored == 100
    assert told(drive) == [("given_up", 101, 140)]  # those were right, and nobody has them
    lost = [each.reason for each in drive.bodies(Notify) if each.reason.code == "given_up"]
    assert "as old as step 141" in str(lost[-1])


def test_what_a_job_lost_is_said_once_however_often_it_tries_to_go_on():
    drive = Drive()
    job = drive.running(150)
    buddies_die(drive, job)
    drive.wait(SECOND)
    drive.tell(GangJoined(job=job.id, generation=2, step=-1), SECOND)
    ready(drive, job)
    killed(drive, job, 100)
    drive.wait(SECOND)
    drive.tell(GangJoined(job=job.id, generation=3, step=100), SECOND)
    ready(drive, job)
    assert told(drive) == [("given_up", 101, 150)]


def alone() -> tuple[Drive, ClusterJob]:
    """A job that has to leave when a node dies, on a site that keeps no memory for it."""
    drive = Drive(2, Policy(recovery=RecoveryPolicy(keep_memory_ns=0)))
    job = drive.running(150)
    drive.tell(NodeSilent(node=job.placement.nodes[0], connection_lost=True))
    return drive, job


def last_words(job: ClusterJob, committed: int) -> GangStopped:
    return GangStopped(
        job=job.id, generation=job.generation, step=committed + 1, committed=committed
    )


def test_the_last_words_of_its_nodes_complete_what_a_job_that_left_has_lost():
    drive, job = alone()
    drive.wait(SECOND)
    assert job.state == "pending" and told(drive) == [("given_up", 101, 150)]
    drive.tell(last_words(job, 158))
    drive.tell(last_words(job, 158))
    assert told(drive) == [("given_up", 101, 150), ("given_up", 151, 158)]
    assert job.lost_steps == 58 and job.committed == 100 and job.step == 159


def test_last_words_that_come_before_a_job_leaves_make_one_notice():
    drive, job = alone()
    drive.tell(last_words(job, 158))
    drive.wait(SECOND)
    assert told(drive) == [("given_up", 101, 158)]


def test_last_words_of_a_job_that_failed_are_of_steps_lost_for_good():
    drive = Drive()
    job = drive.running(150, retries=0)
    for _ in range(3):  # it is given up, and cannot even save what it has
        exited = WorkerExited(
            job=job.id,
            generation=job.generation,
            node=job.placement.nodes[0],
            rank=0,
            cause="user_error",
            step=150,
        )
        drive.tell(exited)
        drive.settle(job)
        if job.ended:
            break
    assert job.state == "failed" and told(drive) == [("lost_steps", 101, 150)]
    drive.tell(last_words(job, 158))
    assert told(drive)[1:] == [("lost_steps", 151, 158)] and job.lost_steps == 58


def test_whoever_cancels_a_job_is_told_of_no_loss():
    drive = Drive()
    job = drive.running(150)
    drive.tell(Cancel(job=job.id))
    drive.tell(last_words(job, 158))
    assert job.state == "cancelled" and told(drive) == []


def test_memory_that_stays_with_the_nodes_is_not_lost_before_it_is_given_up():
    drive = Drive(2)
    job = drive.running(150)
    drive.tell(NodeSilent(node=job.placement.nodes[0], connection_lost=True))
    drive.wait(SECOND)
    drive.tell(last_words(job, 158))
    assert job.kept is not None and told(drive) == []
    drive.wait(drive.core.view.policy.recovery.keep_memory_ns)
    assert told(drive) == [("given_up", 101, 158)]
    assert "kept them in memory for 600 s" in str(drive.bodies(Notify)[-1].reason)


@pytest.mark.parametrize("committed", [100, 150], ids=["as-durable", "behind"])
def test_a_worker_that_dies_while_its_gang_drains_costs_no_step(committed: int):
    """Reports are seconds old: that nothing is to be saved nobody can know."""
    drive = Drive()
    job = drive.running(committed)
    drive.tell(Requeue(job=job.id, hold=True))
    killed(drive, job, committed + 5)
    drive.wait(SECOND)
    assert job.state == "forming" and job.gang.ending == "pending"
    joins(drive, job, committed + 5)
    drive.tell(GangReady(job=job.id, generation=2, step=committed + 5), SECOND)
    assert drive.bodies(Drain)[-1].generation == 2
    drained = GangDrained(job=job.id, generation=2, step=committed + 5)
    drive.tell(drained, SECOND)
    assert (job.state, job.held, job.durable) == ("pending", True, committed + 5)
    assert told(drive) == []


def test_losses_outlive_the_controller():
    drive = Drive()
    job = drive.running(150)
    buddies_die(drive, job)
    drive.wait(SECOND)
    drive.tell(GangJoined(job=job.id, generation=2, step=-1), SECOND)
    ready(drive, job)
    again = Core.restore(drive.core.snapshot()).view.jobs[job.id]
    assert again.losses == job.losses and again.lost_steps == 50


# How far a gang was, gathered from its nodes.


def last(node: int, committed: int, reached: int, generation: int = 1) -> LastSteps:
    return LastSteps(node=node, job=1, generation=generation, committed=committed, reached=reached)


def abort(*nodes: int) -> Command:
    return Command(20, 0, 1, nodes, Abort(reason=WHY, job=1, generation=1))


def test_nodes_that_were_told_to_stop_say_together_how_far_they_were():
    gather = running()
    gather.expect(abort(1, 2))
    assert gather.receive(last(1, 26, 27), 0) == []
    assert gather.receive(last(2, 25, 26), 0) == [
        GangStopped(job=1, generation=1, step=27, committed=25)
    ]
    assert gather.receive(last(2, 25, 26), 0) == []  # again


def test_a_node_that_never_says_its_last_word_is_not_waited_for():
    gather = running()
    gather.expect(Command(21, 0, 1, (0, 1, 2), Stop(reason=WHY, job=1, generation=1)))
    assert gather.receive(last(1, 26, 27), 5) == []
    due = gather.next_deadline_ns()
    assert due is not None and gather.due(due - 1) == []
    assert gather.due(due) == [GangStopped(job=1, generation=1, step=27, committed=26)]
    assert gather.next_deadline_ns() is None


def test_last_words_about_a_generation_that_has_been_replaced_are_not_news():
    gather = running()
    gather.expect(abort(1, 2))
    gather.expect(form(2))
    assert gather.receive(last(1, 26, 27), 0) == []
    assert gather.receive(last(2, 26, 27), 0) == []


def test_how_far_a_gang_was_is_said_before_what_happened_to_it():
    gather = running()
    for node in range(3):
        gather.receive(steps(node, 7, 6), SECOND)
    exited = WorkerExited(node=1, job=1, generation=1, rank=1, cause="worker_killed", step=7)
    progress, event = gather.receive(exited, SECOND)
    assert isinstance(progress, Progress) and (progress.step, progress.committed) == (7, 6)
    assert isinstance(event, WorkerExited)
