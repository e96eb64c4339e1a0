"""Failures that are no part's fault: what counts against a job, and what does not."""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.commands import Notify
from phalanx.cluster.events import (
    Corruption,
    NoProgress,
)
from phalanx.cluster.job import Expected
from phalanx.cluster.policy import Policy, RecoveryPolicy
from tests.cluster.drive import SECOND, Drive
from tests.cluster.test_recovery import DAY, exited


def test_a_gang_that_nobody_answers_for_is_given_up_with_the_evidence():
    drive = Drive(8, Policy(recovery=RecoveryPolicy(failed_formations=3)))
    job = drive.submit()
    drive.wait(DAY)  # no answer, no name of anybody who is missing: only the core's own deadlines
    assert job.state == "failed"
    assert "could not form 3 times" in str(job.why) and "joining" in str(job.why)


def test_steps_that_are_made_again_after_a_corruption_are_not_the_same_step_failing():
    drive = Drive(8)
    job = drive.running(steps=150)
    drive.tell(exited(job, cause="software_bug"))
    drive.wait(SECOND)
    drive.run(job)
    drive.tell(Corruption(job=job.id, generation=job.generation, step=150, clean_step=100))
    drive.wait(SECOND)
    drive.run(job, 100)
    for _ in range(3):  # each a little further, none as far as before
        drive.train(job, 5)
        drive.tell(exited(job, cause="software_bug"))
        drive.wait(SECOND)
        drive.run(job)
    assert job.state == "running" and job.step == 150


def test_hangs_at_different_steps_are_not_the_same_step_failing():
    drive = Drive(8)
    job = drive.running(steps=900, expected=Expected(step_ns=5 * SECOND))
    for step in (500, 100, 60, 20):  # nothing is saved: each time it begins again
        drive.tell(NoProgress(job=job.id, generation=job.generation, step=job.step))
        drive.wait(SECOND)
        drive.run(job, -1)
        drive.train(job, step)
    assert job.state == "running"
    told = [str(each.reason) for each in drive.bodies(Notify)]
    assert any("it begins again, after 900 steps" in each for each in told)


def test_a_step_that_fails_between_two_reports_is_known_again():
    drive = Drive(8)
    job = drive.running(steps=150, retries=100)
    for step in (151, 149, 150):  # the last report before the step that fails came sooner or later
        failure = exited(job, cause="software_bug")
        drive.tell(structs.replace(failure, step=step))
        drive.wait(SECOND)
        if job.state == "forming":
            drive.run(job)
    assert job.state == "failed" and "failed 3 times in a row at about step" in str(job.why)


def test_a_driver_that_fails_is_not_the_jobs_failure():
    drive = Drive(8)
    job = drive.running()
    for _ in range(4):
        drive.tell(exited(job, cause="driver"))
        drive.wait(SECOND)
        drive.run(job)
    assert job.state == "running"


def test_formations_that_failed_long_ago_count_no_more():
    drive = Drive(8, Policy(recovery=RecoveryPolicy(failed_formations=2)))
    job = drive.running()
    for _ in range(4):
        drive.tell(exited(job))
        drive.wait(SECOND)
        drive.tell(exited(job))  # while it forms
        drive.wait(SECOND)
        drive.run(job)
        drive.train(job, 10)
    assert job.state == "running"


def test_a_full_disk_is_given_time_to_get_room():
    drive = Drive(policy=Policy(recovery=RecoveryPolicy(room_tries=3)))
    job = drive.running(steps=150)
    for waits_seconds in (30, 60):
        generation = job.generation
        drive.tell(exited(job, cause="disk_full"))
        assert f"written again in {waits_seconds} s" in str(job.why)
        assert "50 steps are only in the memory" in str(job.why)  # since the checkpoint of 100
        assert drive.bodies(Notify)[-1].level == "error"
        drive.wait((waits_seconds - 1) * SECOND)
        assert job.generation == generation and job.state == "forming"
        drive.wait(2 * SECOND)
        assert job.generation == generation + 1
        drive.run(job, 150)
    drive.tell(exited(job, cause="disk_full"))
    assert job.state == "failed"
    assert "its last 50 steps were only in memory and are LOST" in str(job.why)
    assert "its newest checkpoint is step 100" in str(job.why)


def test_a_full_disk_waits_longer_for_people_than_bad_code_is_tried():
    drive = Drive()
    job = drive.running(steps=150)
    for attempt in range(1, drive.core.view.policy.recovery.room_tries):
        drive.tell(exited(job, cause="disk_full"))
        assert job.state == "forming", attempt
        drive.wait(attempt * 30 * SECOND + SECOND)
        drive.run(job, 150)
    drive.tell(exited(job, cause="disk_full"))
    assert job.state == "failed"


def test_checkpoints_that_are_due_and_missing_are_said_once_and_the_job_trains_on():
    drive = Drive()
    job = drive.running(steps=100)
    every = job.spec.expected.checkpoint_steps
    drive.train(job, 2 * every, durable=100)
    said = [n for n in drive.bodies(Notify) if n.reason.code == "unsaved"]
    assert not said
    for _ in range(3):
        drive.train(job, every, durable=100)
    (said,) = [n for n in drive.bodies(Notify) if n.reason.code == "unsaved"]
    assert said.reason.facts["durable"] == 100 and job.state == "running"
    drive.train(job, every)
    assert job.durable > 100
    drive.train(job, 4 * every, durable=job.durable)
    assert len([n for n in drive.bodies(Notify) if n.reason.code == "unsaved"]) == 2
