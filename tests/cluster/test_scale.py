"""Another number of replicas, asked for in every state of a job: done, or refused in words."""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.core import Core
from phalanx.cluster.jobs.job import GangShape
from phalanx.cluster.policy import Policy, QueuePolicy, Quota
from phalanx.cluster.protocol.commands import Accept, Refuse
from phalanx.cluster.protocol.events import GangJoined, GangReady, JobFinished, Scale
from tests.cluster.drive import SECOND, Drive

HOUR = 3600 * SECOND
ELASTIC = GangShape(replicas=4, least_replicas=1, most_replicas=4, tensor=8, slot_gpus=8)
HALVES = GangShape(replicas=2, least_replicas=1, most_replicas=4, tensor=4, slot_gpus=8)


def test_a_pending_job_starts_with_what_was_asked_for_last() -> None:
    drive = Drive(4)
    first = drive.running(1, gang=ELASTIC, time_limit_ns=HOUR)
    waits = drive.submit(gang=ELASTIC)
    assert waits.id in drive.core.queue.state.reserved
    drive.tell(Scale(job=waits.id, replicas=2))
    twin = Core.restore(drive.core.snapshot())
    seen = len(drive.log)
    drive.tell(JobFinished(job=first.id, generation=first.generation, step=first.step))
    drive.wait(SECOND)
    assert waits.placement is not None and waits.placement.replicas == 2
    for event in drive.log[seen:]:
        twin.handle(event)
    assert twin.snapshot() == drive.core.snapshot()


def test_more_than_a_limit_allows_is_accepted_with_the_limit_named() -> None:
    drive = Drive(4, Policy(queue=QueuePolicy(quotas={"a": Quota(gpus=8, ceiling=16)})))
    job = drive.running(1, gang=structs.replace(ELASTIC, replicas=2), team="a")
    drive.tell(Scale(job=job.id, replicas=4))
    assert str(drive.bodies(Accept)[-1].reason) == (
        "accepted, but it needs 32 GPUs and the ceiling of team a allows 16: it gets no more until"
        " that limit is raised"
    )
    drive.tell(Scale(job=job.id, replicas=2))
    assert str(drive.bodies(Accept)[-1].reason) == "accepted"


def test_a_gang_that_forms_gives_up_replicas_when_it_is_ready() -> None:
    drive = Drive(4)
    job = drive.submit(gang=ELASTIC)
    assert job.gang is not None and job.gang.phase == "joining"
    drive.tell(Scale(job=job.id, replicas=2))
    first = job.generation
    drive.tell(GangJoined(job=job.id, generation=first, step=-1), SECOND)
    drive.tell(GangReady(job=job.id, generation=first, step=0), SECOND)
    assert job.generation == first + 1 and job.placement is not None
    assert job.placement.replicas == 2
    drive.run(job)
    drive.core.ledger.check(drive.core.view)


def test_replicas_that_share_nodes_come_and_leave_together() -> None:
    drive = Drive(4)
    job = drive.running(1, gang=HALVES)
    for replicas in (1, 3):
        (command,) = drive.tell(Scale(job=job.id, replicas=replicas))
        assert isinstance(command.body, Refuse)
        assert "2 at a time" in str(command.body.reason)
    assert job.wanted_replicas == 2
    drive.tell(Scale(job=job.id, replicas=4))
    assert drive.bodies(Accept)[-1].job == job.id
    assert job.placement is not None and job.placement.replicas == 4


def test_replicas_that_share_nodes_unevenly_change_only_while_pending() -> None:
    drive = Drive(4)
    job = drive.running(1, gang=structs.replace(HALVES, replicas=3))
    (command,) = drive.tell(Scale(job=job.id, replicas=2))
    assert isinstance(command.body, Refuse) and "unevenly" in str(command.body.reason)
    (command,) = drive.tell(Scale(job=job.id, replicas=3))
    assert isinstance(command.body, Accept)
