"""Times that a submission brings with it: when it may begin, and by when it must have ended."""

from __future__ import annotations

import pytest

from phalanx.cluster.core import Core
from phalanx.cluster.forecast.why import explain
from phalanx.cluster.job_relations import Dependency
from phalanx.cluster.jobs.job import GangShape, JobSpec
from phalanx.cluster.plan_record import PlanInterval, PlanRecord
from phalanx.cluster.protocol.commands import Drain
from phalanx.cluster.protocol.events import Cancel, GangDrained, Hold, Submit
from tests.cluster.drive import EXPECTED, SECOND, Drive

ONE = GangShape(replicas=1, tensor=8, slot_gpus=8, slot_cpus=8)
MINUTE, HOUR = 60 * SECOND, 3600 * SECOND
PLANNED = PlanRecord(run_seconds=PlanInterval(7200, 9000, 12_000))


def test_a_job_begins_when_it_was_asked_to_and_not_before():
    drive = Drive()
    job = drive.submit(gang=ONE, begin_ns=HOUR)
    assert (job.state, job.eligible) == ("pending", False)
    assert str(job.why) == "it was submitted to begin later"
    assert explain(drive.core.queue, drive.core.view, job.id).estimated_start_ns == HOUR
    drive.wait(59 * MINUTE)
    assert job.state == "pending"
    drive.wait(MINUTE)
    assert job.state == "forming"


def test_what_waits_for_others_or_for_a_person_waits_for_its_time_too():
    drive = Drive()
    first = drive.submit(gang=ONE)
    second = drive.submit(gang=ONE, after=(Dependency("afterany", first.id),), begin_ns=HOUR)
    held = drive.submit(gang=ONE, begin_ns=HOUR, held=True)
    drive.tell(Cancel(job=first.id))
    drive.wait(MINUTE)
    assert second.state == "pending" and str(second.why) == "it was submitted to begin later"
    drive.wait(HOUR - 2 * MINUTE)
    assert second.state == "pending"
    drive.wait(MINUTE)
    assert second.state == "forming" and held.state == "pending"
    drive.tell(Hold(job=held.id, held=False))
    drive.wait(SECOND)
    assert held.state == "forming"


def test_a_start_that_is_set_survives_a_snapshot():
    drive = Drive()
    job = drive.submit(gang=ONE, begin_ns=HOUR)
    drive.core = Core.restore(drive.core.snapshot())
    drive.wait(HOUR)
    assert drive.core.view.jobs[job.id].state == "forming"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"deadline_ns": MINUTE}, "its deadline passed 59 min ago: give a later one"),
        ({"begin_ns": -1}, "begin_ns = -1: must not be negative"),
        ({"begin_ns": 11 * 365 * 24 * HOUR}, "must not be later than in ten years"),
        (
            {"deadline_ns": 2 * HOUR, "time_limit_ns": 3 * HOUR},
            "it needs 3 h and has 1 h until its deadline",
        ),
        (
            {"deadline_ns": 5 * HOUR, "begin_ns": 4 * HOUR, "time_limit_ns": 2 * HOUR},
            "it needs 2 h and has 1 h until its deadline",
        ),
        ({"deadline_ns": 2 * HOUR, "plan": PLANNED}, "it needs 2 h and has 1 h until"),
        ({"deadline_ns": 2 * HOUR, "plan": PLANNED, "time_limit_ns": MINUTE}, ""),
        ({"deadline_ns": 5 * HOUR, "time_limit_ns": 2 * HOUR}, ""),
    ],
)
def test_times_that_cannot_be_kept_are_refused_at_once(fields, said):
    drive = Drive()
    drive.wait(HOUR)
    spec = JobSpec(**{"name": "job", "gang": ONE, "expected": EXPECTED, **fields})
    (answer, *_) = drive.tell(Submit(spec=spec, request="ask"))
    assert said in str(answer.body.reason) if said else str(answer.body.reason) == "accepted"


def test_a_job_that_runs_at_its_deadline_saves_its_state_and_ends():
    drive = Drive()
    job = drive.running(gang=ONE, deadline_ns=HOUR)
    drive.wait(HOUR - drive.now_ns - SECOND)
    assert job.state == "running"
    drive.wait(SECOND)
    assert job.state == "draining" and drive.bodies(Drain)
    drive.tell(GangDrained(job=job.id, generation=job.generation, step=job.step))
    assert job.state == "failed" and str(job.why) == f"its deadline passed at step {job.step}"


def test_a_job_that_cannot_make_its_deadline_any_more_does_not_wait_for_it():
    drive = Drive(1)
    drive.running(gang=ONE)
    job = drive.submit(gang=ONE, deadline_ns=3 * HOUR, time_limit_ns=2 * HOUR)
    drive.wait(HOUR - drive.now_ns - SECOND)
    assert job.state == "pending"
    drive.wait(SECOND)
    assert job.state == "failed" and "did not start in time for its deadline" in str(job.why)
