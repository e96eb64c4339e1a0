"""A job that lives gets other stages: from a step that is not made, and at no other one."""

from __future__ import annotations

import pytest
from msgspec import structs

from phalanx.cluster.core import Core
from phalanx.cluster.jobs.job import ClusterJob, FallbackMapping, SpecChange
from phalanx.cluster.protocol.commands import Accept, Drain, Form, Notify, Refuse
from phalanx.cluster.protocol.events import GangDrained, NodeSilent, Replan
from phalanx.cluster.protocol.messages import WorkerExited
from tests.cluster.drive import EXPECTED, SECOND, SHAPE, Drive

SETTING = "after step 200: samples of 32,768 tokens, 8 a step"


def change(job: ClusterJob, made_before: int, payload: str = "longer samples") -> SpecChange:
    return SpecChange(
        spec=structs.replace(job.spec, payload=payload),
        by="ada",
        settings=(SETTING,),
        made_before=made_before,
        stages_before="as it was",
    )


def ask(drive: Drive, job: ClusterJob, wanted: SpecChange) -> str:
    """What the core answers; "": it accepted."""
    commands = drive.tell(Replan(job=job.id, change=wanted, request="r"))
    (answer,) = [c.body for c in commands if isinstance(c.body, Accept | Refuse)]
    return str(answer.reason) if isinstance(answer, Refuse) else ""


def drained(drive: Drive, job: ClusterJob, step: int) -> list[Form]:
    event = GangDrained(job=job.id, generation=job.generation, step=step)
    return [c.body for c in drive.tell(event, 2 * SECOND) if isinstance(c.body, Form)]


def told(drive: Drive) -> list[str]:
    return [str(note.reason) for note in drive.bodies(Notify)]


def test_the_gang_stops_and_goes_on_with_the_other_stages_and_what_was_measured() -> None:
    drive = Drive(2)
    job = drive.running(150)
    gang, step_ns = job.spec.gang, job.step_ns
    assert step_ns and ask(drive, job, change(job, 200)) == ""
    assert str(job.why) == (
        f"stops at a step boundary and goes on with other stages ({SETTING}), asked for by ada: all"
        " steps up to 200 stay as they are"
    )
    twin, seen = Core.restore(drive.core.snapshot()), len(drive.log)
    (form,) = drained(drive, job, 151)
    assert form.payload == "longer samples" and job.spec.gang == gang
    assert job.step_ns == step_ns, "the mapping is the same"
    assert job.stages_before == "as it was"
    drive.run(job)
    drive.train(job, 60)
    drive.tell(NodeSilent(node=job.placement.nodes[0]))
    drive.wait(60 * SECOND)
    assert drive.last_form().payload == "longer samples", "after a failure too"
    for event in drive.log[seen:]:
        twin.handle(event)
    assert twin.snapshot() == drive.core.snapshot()


@pytest.mark.parametrize("made_before", [0, 149, 150])
def test_a_step_that_is_made_or_has_begun_is_not_altered(made_before: int) -> None:
    drive = Drive(2)
    job = drive.running(150)
    assert ask(drive, job, change(job, made_before)) == (
        f"nothing was changed: step {made_before + 1} would be another one, and job {job.id} has"
        " made 150 steps; the earliest that can still be another is step 152"
    )
    assert job.state == "running" and not drive.bodies(Drain) and job.change is None
    assert ask(drive, job, change(job, 151)) == ""


def test_a_step_that_was_made_before_the_gang_stopped_drops_the_change() -> None:
    drive = Drive(2)
    job = drive.running(150)
    assert ask(drive, job, change(job, 151)) == ""
    (form,) = drained(drive, job, 152)
    assert form.payload != "longer samples" and job.stages_before == "" and job.change is None
    assert any("step 152 was to be the first" in each for each in told(drive))
    drive.run(job)
    assert drive.last_restore().step == 152
    assert ask(drive, job, change(job, 152)).endswith("is step 154")


def test_a_job_that_waits_has_no_step_under_way() -> None:
    drive = Drive(2)
    drive.running(1)
    waits = drive.submit()
    assert ask(drive, waits, change(waits, 0)) == ""
    assert waits.state == "pending" and waits.spec.payload == "longer samples"


def test_other_stages_that_make_no_step_are_taken_back() -> None:
    drive = Drive(2)
    job = drive.running(150, payload="as it was", retries=1)
    job.stages_before = "long ago"
    ask(drive, job, change(job, 200))
    drained(drive, job, 150)
    for _ in range(8):
        if job.spec.payload == "as it was":
            break
        drive.settle(job)
        exited = {"job": job.id, "generation": job.generation, "rank": 0, "detail": "no corpus"}
        drive.tell(WorkerExited(node=job.placement.nodes[0], cause="gpu_out_of_memory", **exited))
    assert job.spec.payload == "as it was" and job.stages_before == "long ago"
    drive.wait(SECOND)
    drive.run(job)
    assert drive.last_restore().step == 150


def test_the_replicas_of_an_elastic_job_stay_as_they_are() -> None:
    shape = structs.replace(SHAPE, replicas=2, least_replicas=1, most_replicas=4)
    drive = Drive(2)
    job = drive.running(150, gang=shape)
    job.wanted = 1
    assert ask(drive, job, change(job, 200)) == ""
    (form,) = drained(drive, job, 151)
    assert job.wanted == 1 and form.replicas == 1


def test_a_fallback_stays_one_and_returns_to_its_own_mapping_with_the_other_stages() -> None:
    drive = Drive(2)
    small = structs.replace(SHAPE, replicas=1)
    fallback = FallbackMapping(gang=small, expected=EXPECTED, payload="fallback")
    job = drive.running(150, fallbacks=(fallback,))
    own, job.own = job.spec, job.spec
    job.spec = own.on_fewer_nodes(fallback)
    wanted = structs.replace(
        change(job, 200), own=structs.replace(own, payload="own, longer samples")
    )
    assert ask(drive, job, wanted) == ""
    (form,) = drained(drive, job, 151)
    assert form.payload == "longer samples" and form.replicas == 1
    assert job.own is not None and job.own.payload == "own, longer samples"
    assert job.former == own, "what it is taken back to waits for its nodes"
