"""Jobs that must leave their nodes take with them what only memory holds, while there is time."""

from __future__ import annotations

import pytest
from msgspec import structs

from phalanx.cluster.core import Core
from phalanx.cluster.jobs.job import ClusterJob, GangShape
from phalanx.cluster.policy import Policy, Qos, QueuePolicy, RecoveryPolicy
from phalanx.cluster.protocol.commands import Abort, Drain, Notify, Stop
from phalanx.cluster.protocol.events import (
    DrainNode,
    GangDrained,
    GangJoined,
    GangReady,
    JobFinished,
    NodeSilent,
    ReadmitNode,
    Requeue,
    SetReservation,
)
from phalanx.cluster.protocol.messages import DeviceError, NodeNotice, WorkerExited
from phalanx.cluster.queue.preemption import lost_gpu_ns
from tests.cluster.drive import EXPECTED, SECOND, Drive

HOUR = 3600 * SECOND


def gang(nodes: int, **fields: int) -> GangShape:
    return GangShape(replicas=nodes, tensor=8, slot_gpus=8, slot_cpus=8, **fields)


def lost_steps(drive: Drive) -> list[int]:
    return [
        note.reason.facts["steps"]
        for note in drive.bodies(Notify)
        if note.reason.code == "given_up"
    ]


def saved(drive: Drive, job: ClusterJob) -> None:
    """A draining gang has written its state and gone."""
    assert job.state == "draining"
    step = job.step
    drive.tell(GangDrained(job=job.id, generation=job.generation, step=step), 2 * SECOND)
    assert job.durable == step and job.state == "pending"


def formed(drive: Drive, job: ClusterJob) -> None:
    """A gang that forms has what its nodes had in memory."""
    for fact in (GangJoined, GangReady):
        drive.tell(fact(job=job.id, generation=job.generation, step=job.committed), SECOND)


@pytest.mark.parametrize("order", [DrainNode, NodeNotice])
@pytest.mark.parametrize("notice_ns", [5 * HOUR, 30 * SECOND])
def test_a_node_that_must_be_empty_is_left_with_every_step_saved(order, notice_ns):
    drive = Drive(2)
    job = drive.running(190, gang=gang(2), time_limit_ns=10 * HOUR)
    until_ns = drive.now_ns + notice_ns
    drive.tell(order(node=0, deadline_ns=until_ns))
    if notice_ns > HOUR:
        drive.wait(notice_ns - 10 * 60 * SECOND)
        assert job.state == "running", "nothing can replace the node, and there is time"
        drive.wait(9 * 60 * SECOND)
    assert not drive.bodies(Abort) and drive.bodies(Drain)
    assert drive.bodies(Drain)[-1].deadline_ns <= until_ns
    saved(drive, job)
    assert "n0" in str(job.why) and not lost_steps(drive)


def test_a_drain_without_a_deadline_saves_the_steps_too():
    drive = Drive(2)
    job = drive.running(190, gang=gang(2))
    drive.tell(DrainNode(node=1))
    saved(drive, job)


def test_a_spare_takes_over_from_a_node_that_must_be_empty():
    drive = Drive(3)
    job = drive.running(190, gang=gang(2), spares=1)
    node = job.placement.nodes[0]
    drive.tell(DrainNode(node=node, deadline_ns=drive.now_ns + 5 * HOUR))
    drive.wait(SECOND)
    assert node not in job.placement.nodes
    drive.run(job)
    assert (drive.last_restore().step, drive.last_restore().source) == (190, "peer")
    assert not lost_steps(drive)


def test_without_time_to_save_the_job_leaves_at_once_and_says_what_is_lost():
    drive = Drive(2)
    job = drive.running(190, gang=gang(2))
    drive.tell(NodeNotice(node=0, deadline_ns=drive.now_ns + 3 * SECOND))
    drive.wait(SECOND)
    assert job.state == "pending" and job.durable == 100
    drive.wait(HOUR)  # what its nodes keep in memory is kept for a while
    assert lost_steps(drive) == [90]


def test_a_drain_that_storage_holds_up_is_given_time_until_the_node_goes_and_no_longer():
    drive = Drive(2)
    job = drive.running(190, gang=gang(2))
    until_ns = drive.now_ns + 100 * SECOND
    drive.tell(NodeNotice(node=0, deadline_ns=until_ns))
    first_ns = drive.bodies(Drain)[-1].deadline_ns
    assert first_ns < until_ns
    drive.wait(70 * SECOND)
    assert job.state == "draining" and drive.bodies(Drain)[-1].deadline_ns == until_ns
    drive.wait(40 * SECOND)
    assert job.state == "pending"
    drive.wait(HOUR)  # its nodes keep what they have for a while
    assert lost_steps(drive) == [90]


def test_a_gang_that_forms_on_a_node_that_must_be_empty_saves_its_steps_first():
    drive = Drive(2)
    job = drive.running(190, gang=gang(2))
    node = job.placement.nodes[0]
    drive.tell(WorkerExited(job=job.id, generation=1, node=node, rank=0, cause="worker_killed"))
    drive.wait(SECOND)
    assert job.gang.phase == "joining"
    drive.tell(DrainNode(node=1, deadline_ns=drive.now_ns + 100 * SECOND))
    formed(drive, job)
    saved(drive, job)


def test_all_nodes_of_a_job_that_must_be_empty_at_once_lose_nothing():
    drive = Drive(3)
    job = drive.running(190, gang=gang(2))
    for node in job.placement.nodes:  # there is one node to take over, not two
        drive.tell(NodeNotice(node=node, deadline_ns=drive.now_ns + HOUR))
    drive.wait(SECOND)
    formed(drive, job)
    assert job.state == "running"
    drive.wait(HOUR - 60 * SECOND)
    saved(drive, job)
    assert not lost_steps(drive)


def empty_later(drive: Drive, job: ClusterJob) -> int:
    """A node of a job must be empty in five hours, and nothing can take its place."""
    node = job.placement.nodes[0]
    drive.tell(DrainNode(node=node, deadline_ns=drive.now_ns + 5 * HOUR))
    drive.wait(HOUR)
    assert job.state == "running" and node in job.placement.nodes
    return node


def test_a_node_that_becomes_free_before_the_deadline_takes_over():
    drive = Drive(3)
    other = drive.running(gang=gang(1), name="other")
    job = drive.running(190, gang=gang(2))
    node = empty_later(drive, job)
    drive.tell(JobFinished(job=other.id, generation=other.generation, step=150))
    drive.wait(3 * SECOND)
    assert node not in job.placement.nodes
    drive.run(job)
    assert (drive.last_restore().step, drive.last_restore().source) == (190, "peer")
    drive.wait(5 * HOUR)
    assert job.state == "running" and job.preemptions == 0


def test_a_node_that_becomes_free_while_the_gang_forms_takes_over_when_it_runs():
    drive = Drive(3)
    other = drive.running(gang=gang(1), name="other")
    job = drive.running(190, gang=gang(2))
    node = empty_later(drive, job)
    died = WorkerExited(job=job.id, generation=1, node=node, rank=0, cause="worker_killed")
    drive.tell(died)
    drive.wait(SECOND)
    assert job.state == "forming" and node in job.placement.nodes, "it is good until the deadline"
    drive.tell(JobFinished(job=other.id, generation=other.generation, step=150))
    drive.wait(3 * SECOND)
    formed(drive, job)
    drive.wait(3 * SECOND)
    assert node not in job.placement.nodes


def test_a_node_that_goes_to_a_waiting_job_does_not_stop_the_one_that_would_move_there():
    drive = Drive(3)
    other = drive.running(gang=gang(1), name="other")
    job = drive.running(190, gang=gang(2))
    waits = drive.submit(gang=gang(1), priority=1000, name="waits")
    node = empty_later(drive, job)
    drive.tell(JobFinished(job=other.id, generation=other.generation, step=150))
    drive.wait(3 * SECOND)
    assert waits.state == "forming"
    assert job.state == "running" and job.generation == 1 and node in job.placement.nodes


@pytest.mark.parametrize("order", [DrainNode, NodeNotice])
def test_a_node_cannot_be_wanted_empty_before_there_was_time(order):
    drive = Drive(2)
    job = drive.running(190, gang=gang(2))
    (command,) = drive.tell(order(node=0, deadline_ns=-5))
    assert "deadline_ns = -5: must be 0 to" in str(command.body.reason)
    assert job.state == "running"


def test_a_fault_of_a_node_that_must_be_empty_later_makes_the_job_leave_now():
    drive = Drive(2)
    job = drive.running(190, gang=gang(2))
    node = empty_later(drive, job)
    drive.tell(DeviceError(node=node, cause="hbm_ecc", job=job.id))
    drive.wait(2 * SECOND)
    assert job.state == "pending"


def test_a_drain_that_is_taken_back_leaves_the_job_where_it_is():
    drive = Drive(2)
    job = drive.running(190, gang=gang(2))
    node = empty_later(drive, job)
    drive.tell(ReadmitNode(node=node))
    drive.wait(6 * HOUR)
    assert job.state == "running" and not drive.bodies(Drain)


def test_of_two_deadlines_for_a_node_the_sooner_counts():
    drive = Drive(2)
    job = drive.running(190, gang=gang(2))
    node = empty_later(drive, job)
    drive.tell(NodeNotice(node=node, deadline_ns=drive.now_ns + 3 * HOUR))
    drive.tell(NodeNotice(node=node, deadline_ns=drive.now_ns + 9 * HOUR))
    drive.wait(3 * HOUR - 60 * SECOND)
    saved(drive, job)
    assert not lost_steps(drive)


def test_an_elastic_job_keeps_its_replicas_until_the_node_must_be_empty():
    drive = Drive(2)
    job = drive.running(190, gang=gang(2, least_replicas=1))
    node = empty_later(drive, job)
    drive.wait(4 * HOUR - 60 * SECOND)
    assert job.placement.replicas == 1 and node not in job.placement.nodes
    drive.run(job)
    assert (drive.last_restore().step, drive.last_restore().source) == (190, "peer")


def test_a_restored_core_knows_when_a_node_must_be_empty():
    drive = Drive(2)
    job = drive.running(190, gang=gang(2))
    empty_later(drive, job)
    drive.core = Core.restore(drive.core.snapshot())
    drive.wait(4 * HOUR - 60 * SECOND)
    saved(drive, drive.core.view.jobs[job.id])


def test_it_is_said_once_that_a_job_stays_on_a_node_that_must_be_empty():
    drive = Drive(2)
    job = drive.running(190, gang=gang(2))
    empty_later(drive, job)
    for _ in range(3):
        drive.train(job, 10)
        drive.wait(HOUR)
    for seconds in range(5):  # a notice that is said again and again, a little sooner
        drive.tell(NodeNotice(node=job.placement.nodes[0], deadline_ns=10 * HOUR - seconds))
    told = [note.reason.code for note in drive.bodies(Notify)]
    assert told.count("stays_on") == 1


def test_a_replacement_that_is_gone_before_the_swap_leaves_the_gang_where_it_was():
    drive = Drive(3)
    job = drive.running(190, gang=gang(2))
    node, other = job.placement.nodes[0], 3 - sum(job.placement.nodes)
    drive.tell(DrainNode(node=node, deadline_ns=drive.now_ns + HOUR))
    assert job.gang.phase == "settling"
    drive.tell(NodeSilent(node=other))
    drive.wait(SECOND)
    formed(drive, job)
    assert job.state == "running" and node in job.placement.nodes and not lost_steps(drive)
    drive.wait(HOUR - 60 * SECOND)
    saved(drive, job)


@pytest.mark.parametrize("time", ["enough", "too-little"])
def test_a_gang_that_breaks_while_it_leaves_forms_once_more_to_save_its_steps(time):
    drive = Drive(2)
    job = drive.running(190, gang=gang(2))
    left_ns = 5 * 60 * SECOND if time == "enough" else 10 * SECOND
    drive.tell(NodeNotice(node=0, deadline_ns=drive.now_ns + left_ns))
    drive.wait(max(0, left_ns - 110 * SECOND))
    assert job.state == "draining"
    node = job.placement.nodes[1]
    died = WorkerExited(job=job.id, generation=1, node=node, rank=8, cause="worker_killed")
    drive.tell(died)
    drive.wait(SECOND)
    if time == "too-little":
        assert job.state == "pending"
        drive.wait(HOUR)
        assert lost_steps(drive) == [90]
        return
    assert job.state == "forming" and not lost_steps(drive)
    formed(drive, job)
    saved(drive, job)
    assert not lost_steps(drive)


def test_a_notice_with_an_unknown_cause_moves_the_job_too():
    drive = Drive(4)
    job = drive.running(190, gang=gang(2))
    node = job.placement.nodes[0]
    drive.tell(NodeNotice(node=node, deadline_ns=drive.now_ns + HOUR, cause="moving day"))
    drive.wait(SECOND)
    assert node not in job.placement.nodes


URGENT = Policy(queue=QueuePolicy(qos={"normal": Qos(), "urgent": Qos(priority=9, preempts=True)}))


def reforming(drive: Drive, **fields: object) -> ClusterJob:
    """A gang that has run for a while and forms again since a worker died."""
    job = drive.running(190, gang=gang(4), preemptible=True, **fields)
    node = job.placement.nodes[0]
    died = WorkerExited(job=job.id, generation=1, node=node, rank=0, cause="worker_killed")
    drive.tell(died)
    drive.wait(SECOND)
    assert job.gang.phase == "joining"
    return job


def preempt(drive: Drive) -> ClusterJob:
    return drive.submit(gang=gang(4), qos="urgent", name="urgent")


def reserve(drive: Drive) -> None:
    window = SetReservation(
        name="upkeep", start_ns=drive.now_ns + 30 * SECOND, end_ns=drive.now_ns + HOUR, gpus=32
    )
    drive.tell(window)
    drive.wait(SECOND)


@pytest.mark.parametrize("claim", [preempt, reserve])
def test_a_gang_that_forms_when_others_want_its_nodes_saves_its_steps_within_the_grace(claim):
    drive = Drive(4, URGENT)
    job = reforming(drive)
    claim(drive)
    assert job.state == "forming" and not drive.bodies(Stop) and job.preemptions == 1
    formed(drive, job)
    saved(drive, job)
    assert job.preemptions == 1 and not lost_steps(drive)


@pytest.mark.parametrize("claim", [preempt, reserve])
def test_a_gang_that_does_not_form_within_the_grace_is_stopped_and_says_what_is_lost(claim):
    drive = Drive(4, URGENT)
    job = reforming(drive)
    claim(drive)
    drive.wait(61 * SECOND)
    assert job.state == "pending"
    drive.wait(HOUR // 2)
    assert lost_steps(drive) == [90]


def test_the_grace_counts_from_the_preemption_not_from_when_the_gang_has_formed():
    drive = Drive(4, URGENT)
    job = reforming(drive)
    urgent = preempt(drive)
    drive.wait(40 * SECOND)
    formed(drive, job)
    assert job.state == "draining"
    drive.wait(21 * SECOND)
    assert job.state == "pending" and urgent.state == "forming" and lost_steps(drive) == [90]


def test_a_gang_without_anything_in_memory_leaves_at_once():
    drive = Drive(4, Policy(queue=structs.replace(URGENT.queue, least_run_ns=0)))
    job = drive.submit(gang=gang(4), preemptible=True)
    assert job.state == "forming"
    urgent = preempt(drive)
    assert job.state == "pending" and urgent.state == "forming" and not lost_steps(drive)


def test_steps_that_a_forming_gang_cannot_save_in_time_count_as_lost_work():
    drive = Drive(4, Policy(queue=structs.replace(URGENT.queue, grace_ns=20 * SECOND)))
    job = drive.running(190, gang=gang(4), preemptible=True)
    running = lost_gpu_ns(drive.core.view, job)
    node = job.placement.nodes[0]
    drive.tell(WorkerExited(job=job.id, generation=1, node=node, rank=0, cause="worker_killed"))
    drive.wait(SECOND)
    forming = lost_gpu_ns(drive.core.view, job)
    assert forming - running == 90 * job.step_ns * 32


def test_a_restored_core_knows_until_when_a_forming_gang_may_stay():
    drive = Drive(4, URGENT)
    job = reforming(drive)
    preempt(drive)
    drive.core = Core.restore(drive.core.snapshot())
    drive.wait(61 * SECOND)
    assert drive.core.view.jobs[job.id].state == "pending" and lost_steps(drive) == [90]


def test_a_preempted_gang_that_forms_loses_its_steps_only_with_its_nodes():
    drive = Drive(5, Policy(queue=URGENT.queue, recovery=RecoveryPolicy(swap=False)))
    job = reforming(drive, expected=structs.replace(EXPECTED, rejoin_ns=SECOND))
    preempt(drive)
    for node in job.placement.nodes[:2]:
        drive.tell(NodeSilent(node=node))
    assert job.state == "pending" and lost_steps(drive) == [90]


@pytest.mark.parametrize(
    "first",
    [
        lambda drive: DrainNode(node=0),
        lambda drive: NodeNotice(node=0, deadline_ns=drive.now_ns + 2 * HOUR),
        lambda drive: Requeue(job=1),
    ],
)
def test_a_gang_that_saves_its_state_is_told_of_a_nearer_deadline_and_gone_by_then(first):
    drive = Drive(2)
    slow = structs.replace(EXPECTED, flush_ns=1800 * SECOND)
    job = drive.running(190, gang=gang(2), expected=slow)
    drive.tell(first(drive))
    assert job.gang.phase == "draining"
    by_ns = drive.now_ns + 120 * SECOND
    drive.tell(NodeNotice(node=0, deadline_ns=by_ns))
    assert drive.bodies(Drain)[-1].deadline_ns == by_ns
    told = len(drive.bodies(Drain))
    drive.tell(NodeNotice(node=0, deadline_ns=by_ns + HOUR))
    assert len(drive.bodies(Drain)) == told, "a later one changes nothing"
    drive.wait(130 * SECOND)
    assert job.placement is None


def test_a_node_that_a_person_wants_empty_at_once_is_left_in_time_for_the_sites_deadline():
    drive = Drive(2)
    slow = structs.replace(EXPECTED, flush_ns=600 * SECOND)
    job = drive.running(190, gang=gang(2), expected=slow)
    by_ns = drive.now_ns + 5000 * SECOND
    drive.tell(NodeNotice(node=0, deadline_ns=by_ns))
    assert job.state == "running"
    drive.tell(DrainNode(node=0), SECOND)
    assert job.gang.phase == "draining" and drive.bodies(Drain)[-1].deadline_ns <= by_ns


def test_a_node_that_must_be_empty_now_is_not_used_until_a_later_deadline():
    drive = Drive(2)
    job = drive.running(190, gang=gang(2))
    drive.tell(DrainNode(node=0))
    drive.tell(NodeNotice(node=0, deadline_ns=drive.now_ns + 5 * HOUR), SECOND)
    assert job.gang.phase == "draining"
    saved(drive, job)
