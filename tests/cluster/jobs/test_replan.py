"""A job gets another mapping while it lives: at a step boundary, without losing a step."""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.core import Core
from phalanx.cluster.jobs.job import ClusterJob, GangShape, SpecChange
from phalanx.cluster.plan_record import PlanInterval, PlanRecord
from phalanx.cluster.policy import Policy, Qos, QueuePolicy, Quota
from phalanx.cluster.protocol.commands import Accept, Command, Drain, Form, Notify, Refuse
from phalanx.cluster.protocol.events import (
    Cancel,
    GangDrained,
    JobFinished,
    NodeSilent,
    Replan,
    Requeue,
)
from phalanx.cluster.protocol.messages import WorkerExited
from tests.cluster.drive import EXPECTED, SECOND, SHAPE, Drive

HOUR = 3600 * SECOND
PIPELINE = structs.replace(SHAPE, replicas=1, pipeline=2)


def change(job: ClusterJob, gang: GangShape = PIPELINE, **fields: object) -> SpecChange:
    """From two replicas to two stages, unless said otherwise."""
    values: dict[str, object] = {
        "gang": gang,
        "expected": structs.replace(EXPECTED, step_ns=3 * SECOND),
        "plan": PlanRecord(mapping="pipeline 2"),
        "payload": "two stages",
        **fields,
    }
    return SpecChange(
        spec=structs.replace(job.spec, **values),
        by="ada",
        settings=("parallel.pipeline = 2",),
        before="data 2",
        step_ns=PlanInterval(2 * SECOND, 3 * SECOND, 4 * SECOND),
    )


def ask(drive: Drive, job: ClusterJob, wanted: SpecChange) -> str:
    """What the core answers; "": it accepted."""
    commands = drive.tell(Replan(job=job.id, change=wanted, request="r"))
    (answer,) = [c.body for c in commands if isinstance(c.body, Accept | Refuse)]
    assert answer.request == "r" and answer.job == job.id
    return str(answer.reason) if isinstance(answer, Refuse) else ""


def saved(drive: Drive, job: ClusterJob) -> list[Command]:
    drained = GangDrained(job=job.id, generation=job.generation, step=job.step)
    return drive.tell(drained, 2 * SECOND)


def test_the_gang_saves_its_step_and_goes_on_from_there_as_changed() -> None:
    drive = Drive(2)
    job = drive.running(150)
    nodes, generation = job.placement.nodes, job.generation
    assert ask(drive, job, change(job)) == ""
    assert job.state == "draining" and job.spec.gang == SHAPE, (
        "nothing is changed before it is safe"
    )
    assert str(job.why) == (
        "changes at a step boundary (parallel.pipeline = 2), asked for by ada: from data 2 to"
        " pipeline 2"
    )
    twin, seen = Core.restore(drive.core.snapshot()), len(drive.log)
    commands = saved(drive, job)
    (form,) = [c.body for c in commands if isinstance(c.body, Form)]
    assert form.generation == generation + 1 and form.payload == "two stages"
    assert (form.replicas, form.world) == (1, 16) and set(form.nodes) == set(nodes)
    assert job.spec.gang == PIPELINE and job.spec.user == "" and job.change is None
    drive.run(job)
    restore = drive.last_restore()
    assert (restore.step, restore.source) == (150, "remote")
    drive.train(job, 10)
    assert job.step == 160 and job.lost_steps == 0
    drive.core.ledger.check(drive.core.view)
    for event in drive.log[seen:]:
        twin.handle(event)
    assert twin.snapshot() == drive.core.snapshot()


def test_what_was_measured_of_the_old_mapping_is_forgotten() -> None:
    drive = Drive(2)
    job = drive.running(150)
    assert job.step_ns == 5 * SECOND
    ask(drive, job, change(job))
    saved(drive, job)
    assert job.step_ns == 0 and job.expected.step_ns == 3 * SECOND


def test_a_job_becomes_larger_and_smaller() -> None:
    drive = Drive(4)
    job = drive.running(150)
    for replicas in (4, 1):
        gang = structs.replace(SHAPE, replicas=replicas)
        assert ask(drive, job, change(job, gang, payload=f"{replicas}")) == ""
        saved(drive, job)
        drive.run(job)
        assert len(job.placement.nodes) == replicas
        drive.train(job, 10)
    assert job.lost_steps == 0 and job.step == 170
    drive.core.ledger.check(drive.core.view)


def test_nobody_who_waits_gets_the_nodes_in_between() -> None:
    drive = Drive(2)
    job = drive.running(150, time_limit_ns=HOUR)
    waits = drive.submit(priority=1000)
    assert waits.state == "pending" and waits.id in drive.core.queue.state.reserved
    assert ask(drive, job, change(job)) == ""
    saved(drive, job)
    assert job.state == "forming"
    drive.wait(SECOND)
    assert waits.state == "pending"


def test_a_change_without_a_place_is_refused_and_nothing_stops() -> None:
    drive = Drive(3)
    job = drive.running(150)
    drive.submit(gang=structs.replace(SHAPE, replicas=1))
    told = ask(drive, job, change(job, structs.replace(SHAPE, replicas=3)))
    assert told.startswith("nothing was changed, since the gang has no place as it would be: ")
    assert "3" in told
    told = ask(drive, job, change(job, structs.replace(SHAPE, replicas=4)))
    assert "4" in told and "3" in told, "more than the fleet has"
    assert job.state == "running" and not drive.bodies(Drain) and job.change is None
    drive.core.ledger.check(drive.core.view)


def test_a_change_beyond_a_limit_is_refused_with_the_numbers() -> None:
    drive = Drive(4, Policy(queue=QueuePolicy(quotas={"a": Quota(gpus=8, ceiling=24)})))
    job = drive.running(150, team="a")
    other = drive.submit(team="a", gang=structs.replace(SHAPE, replicas=1))
    assert other.state == "forming"
    told = ask(drive, job, change(job, structs.replace(SHAPE, replicas=3)))
    assert told == "it would take 8 GPUs more, and team a with class of service normal may take 0"
    assert ask(drive, job, change(job)) == "", "the same GPUs, another mapping"


def test_what_makes_no_sense_is_refused() -> None:
    drive = Drive(2)
    job = drive.running(150, payload="two stages", gang=PIPELINE)
    assert ask(drive, job, change(job)) == f"job {job.id} is so already: nothing was changed"
    told = ask(drive, job, change(job, SHAPE, user="eve"))
    assert told == "user = eve: was , and stays so while the job lives"
    bad = structs.replace(SHAPE, replicas=0)
    assert "gang.replicas = 0: must be at least 1" in ask(drive, job, change(job, bad))
    assert ask(drive, job, change(job, SHAPE)) == ""
    told = ask(drive, job, change(job, structs.replace(SHAPE, replicas=1)))
    assert told == (
        f"job {job.id} is being changed already (parallel.pipeline = 2): ask again once it runs"
    )
    drive.tell(Cancel(job=job.id))
    assert "has already ended" in ask(drive, job, change(job, SHAPE))


def test_a_job_that_waits_asks_for_the_changed_gang_from_then_on() -> None:
    drive = Drive(2)
    first = drive.running(1, time_limit_ns=HOUR)
    waits = drive.submit()
    assert ask(drive, waits, change(waits, structs.replace(SHAPE, replicas=1))) == ""
    assert waits.state == "pending" and waits.spec.gang.replicas == 1
    drive.tell(JobFinished(job=first.id, generation=first.generation, step=first.step))
    drive.wait(SECOND)
    assert waits.placement is not None and len(waits.placement.nodes) == 1


def test_a_gang_that_has_made_nothing_yet_starts_anew_at_once() -> None:
    drive = Drive(2)
    job = drive.submit()
    assert job.gang is not None and job.gang.phase == "joining"
    assert ask(drive, job, change(job)) == ""
    assert job.state == "forming" and drive.last_form().payload == "two stages"
    assert not drive.bodies(Drain)
    drive.run(job)


def test_a_gang_that_breaks_before_its_state_is_safe_goes_on_as_it_was() -> None:
    drive = Drive(2)
    job = drive.running(150)
    ask(drive, job, change(job))
    for node in job.placement.nodes[:1]:
        drive.tell(NodeSilent(node=node))
    while job.state == "draining":
        drive.wait(SECOND)
    for _ in range(600):
        if job.change is None:
            break
        drive.wait(SECOND)
    assert job.spec.gang == SHAPE and job.change is None
    told = [str(note.reason) for note in drive.bodies(Notify)]
    assert any("the change was not carried out" in each for each in told)


def test_a_change_that_makes_no_step_is_taken_back() -> None:
    drive = Drive(2)
    job = drive.running(150, payload="as it was", retries=1)
    ask(drive, job, change(job))
    saved(drive, job)
    for _ in range(8):
        if job.spec.gang == SHAPE:
            break
        drive.settle(job)
        exited = {"job": job.id, "generation": job.generation, "rank": 0, "detail": "no memory"}
        drive.tell(WorkerExited(node=job.placement.nodes[0], cause="gpu_out_of_memory", **exited))
    assert job.spec.gang == SHAPE and job.spec.payload == "as it was"
    told = [str(note.reason) for note in drive.bodies(Notify)]
    assert any("it made no step as changed" in each for each in told)
    drive.wait(SECOND)
    drive.run(job)
    assert drive.last_restore().step == 150 and drive.last_form().payload == "as it was"
    drive.train(job, 10)
    assert job.lost_steps == 0 and job.step == 160 and job.former is None


def test_whoever_must_be_gone_for_others_waits_as_changed() -> None:
    urgent = Qos(priority=1000, preempts=True)
    drive = Drive(2, Policy(queue=QueuePolicy(qos={"normal": Qos(), "urgent": urgent})))
    job = drive.running(150, preemptible=True)
    drive.wait(HOUR)
    first = drive.submit(qos="urgent")
    assert job.state == "draining" and job.gang is not None and job.gang.leave_by_ns
    assert ask(drive, job, change(job)) == ""
    saved(drive, job)
    assert job.state == "pending" and job.spec.gang == PIPELINE
    drive.wait(SECOND)
    assert first.state == "forming" and job.state == "pending"


def test_a_job_that_is_sent_away_takes_the_change_with_it() -> None:
    drive = Drive(2)
    job = drive.running(150)
    drive.tell(Requeue(job=job.id, hold=True))
    assert ask(drive, job, change(job)) == ""
    saved(drive, job)
    assert job.state == "pending" and job.held and job.spec.gang == PIPELINE
