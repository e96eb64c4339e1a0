"""Failures that are no part's fault: what counts against a job, and what does not."""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.jobs.job import Expected
from phalanx.cluster.policy import Policy, RecoveryPolicy
from phalanx.cluster.protocol.commands import Check, Notify
from phalanx.cluster.protocol.events import (
    Corruption,
    NoProgress,
    Progress,
)
from tests.cluster.drive import SECOND, Drive
from tests.cluster.recovery.test_recover import DAY, exited

MINUTE = 60 * SECOND


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


def test_a_bus_error_has_its_node_tested_before_more_work():
    drive = Drive(8)
    job = drive.running(steps=50)
    told = exited(job, cause="bus_error")
    drive.tell(told)
    drive.wait(SECOND)
    assert [check.node for check in drive.bodies(Check)] == [told.node]
    assert job.retries_used == 1  # it may be the job's own use of /dev/shm


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
    assert any("900 committed steps (1 to 900) are lost" in each for each in told)


def fail(drive, job, *, rank=0, step=-1, cause="user_error", detail="ValueError: bad sample"):
    """A worker fails; the gang waits, if it has to, and runs again unless it is given up."""
    told = exited(job, cause=cause)
    drive.tell(structs.replace(told, rank=rank, step=step, detail=detail))
    drive.settle(job)
    if not job.ended and job.gang.ending is None:
        drive.run(job)


def test_a_step_that_fails_is_known_again_by_ranks_one_step_apart():
    drive = Drive(8)
    job = drive.running(steps=150, retries=100)
    for step in (151, 150, 151):
        fail(drive, job, step=step, cause="software_bug")
    drive.save_and_leave(job)
    assert job.state == "failed" and "failed 3 times in a row at step 151" in str(job.why)


def test_kills_from_outside_never_end_a_job_however_many_and_wherever():
    drive = Drive(8)
    job = drive.running(steps=150, retries=0)
    for number in range(60):
        cause = ("worker_killed", "keeper_lost", "agent_restarted")[number % 3]
        generation = job.generation
        drive.tell(exited(job, cause=cause))
        drive.wait(SECOND)
        if number < 5:
            assert job.generation > generation, "it forms again at once"
        drive.settle(job)  # without progress it takes a breath after some of them
        if number % 2 == 0:  # again while it forms
            drive.tell(exited(job, cause="worker_killed"))
            drive.settle(job)
        drive.run(job)
    assert job.state == "running" and job.retries_used == 0 and job.failures_there == 0


def test_failures_of_other_ranks_in_other_ways_are_no_crash_loop():
    drive = Drive(8)
    job = drive.running(steps=150, retries=100)
    for number in range(9):
        fail(drive, job, rank=number, detail=f"error {number}")
    assert job.state == "running"


def test_the_same_error_on_other_ranks_and_other_errors_of_one_rank_are_a_crash_loop():
    for ranks, details in (((1, 2, 3), ("a", "a", "a")), ((1, 1, 1), ("a", "b", "c"))):
        drive = Drive(8)
        job = drive.running(steps=150, retries=100)
        for rank, detail in zip(ranks, details, strict=True):
            fail(drive, job, rank=rank, detail=detail)
        drive.save_and_leave(job)
        assert job.state == "failed" and job.why.code == "same_step"


def test_committed_progress_between_failures_clears_the_count():
    drive = Drive(8)
    job = drive.running(steps=150, retries=2)
    for _ in range(20):
        fail(drive, job)
        assert job.state == "running" and job.retries_used == 1
        drive.train(job, 4)
        assert job.retries_used == 0 and job.failures_there == 0


def test_progress_that_only_the_keepers_knew_of_clears_the_count_too():
    drive = Drive(8)
    job = drive.running(steps=150, retries=2)
    for step in (154, 158, 162, 166):  # no report came between a start and the failure
        told = structs.replace(exited(job, cause="user_error"), step=step)
        drive.tell(told)
        drive.settle(job)
        drive.run(job, step)
    assert job.state == "running" and job.retries_used == 1


def test_failures_without_progress_wait_longer_each_time_and_then_end_the_job():
    drive = Drive(8)
    job = drive.running(steps=150, retries=3)
    for number, waits_seconds in enumerate((0, 10, 20)):
        generation = job.generation
        told = exited(job, cause="user_error")
        drive.tell(structs.replace(told, rank=number, detail=f"error {number}"))
        if waits_seconds:
            assert f"starts again in {waits_seconds} s" in str(job.why)
            drive.wait((waits_seconds - 1) * SECOND)
            assert job.generation == generation
        drive.wait(2 * SECOND)
        assert job.generation == generation + 1
        drive.run(job)
    fail(drive, job, rank=9, detail="error 9")
    drive.save_and_leave(job)
    assert job.state == "failed" and "more often than its 3 retries" in str(job.why)


def test_a_long_healthy_time_gives_a_program_without_steps_its_retries_back():
    drive = Drive(8)
    job = drive.submit(expected=Expected(snapshot_steps=0), retries=1)
    drive.run(job)
    for _ in range(6):  # the same error at "step 0" each time: a month apart, or an hour
        drive.wait(60 * MINUTE)
        fail(drive, job)
    assert job.state == "running"
    fail(drive, job)
    assert job.state == "failed"


def test_steps_that_are_made_again_are_no_progress_at_the_step_that_fails():
    drive = Drive(8, Policy(recovery=RecoveryPolicy(peer_memory=False)))
    job = drive.running(steps=150, retries=100)
    for _ in range(3):  # from the checkpoint of step 100 each time
        assert job.state == "running"
        fail(drive, job, step=150)
        if not job.ended:
            drive.train(job, 50)
    assert job.state == "failed" and job.why.code == "same_step"


def test_a_job_that_is_given_up_first_saves_what_only_memory_holds():
    drive = Drive(8)
    job = drive.running(steps=150, retries=0)
    assert job.durable == 100
    fail(drive, job)
    assert job.state == "forming" and job.gang.ending == "failed"
    assert any("first it forms once more" in str(each.reason) for each in drive.bodies(Notify))
    drive.save_and_leave(job)
    assert job.state == "failed" and job.durable == 150 and job.why.code == "retries"
    assert not [n for n in drive.bodies(Notify) if n.reason.code == "lost_steps"]


def test_a_job_that_cannot_even_save_says_what_is_lost():
    drive = Drive(8)
    job = drive.running(steps=150, retries=0)
    fail(drive, job)
    for _ in range(2):
        drive.tell(exited(job, cause="user_error"))
        drive.settle(job)
    assert job.state == "failed" and job.durable == 100
    (told,) = [n for n in drive.bodies(Notify) if n.reason.code == "lost_steps"]
    assert "50 committed steps (101 to 150) are lost" in str(told.reason)


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


def test_storage_that_is_away_is_tried_again_ever_less_often_and_counts_no_retry():
    drive = Drive()
    job = drive.running(steps=150, retries=0)
    waited = []
    while True:
        generation, since = job.generation, drive.now_ns
        told = structs.replace(exited(job, cause="storage"), detail="/r: Input/output error (EIO).")
        drive.tell(told)
        if job.ended:
            break
        assert job.retries_used == 0 and "Input/output error" in str(job.why)
        drive.settle(job)
        assert job.generation == generation + 1
        waited.append((drive.now_ns - since) // SECOND)
        if len(waited) % 2:  # where it does not even form
            drive.run(job)
    assert waited[:5] == [1, 2, 4, 8, 16] and waited[-1] == 300
    assert len(waited) == drive.core.view.policy.recovery.storage_tries - 1
    assert "its storage failed 12 times in a row: /r: Input/output error (EIO)." in str(job.why)
    assert "Its last 50 steps were only in memory and are LOST" in str(job.why)


def test_storage_that_comes_back_starts_the_count_anew():
    drive = Drive()
    job = drive.running(steps=150, retries=0)
    for _ in range(30):
        drive.tell(exited(job, cause="storage"))
        drive.settle(job)
        drive.run(job)
        drive.train(job, 1)
    assert job.state == "running"


def test_a_program_whose_files_are_away_later_is_tried_as_long_as_storage():
    drive = Drive()
    job = drive.submit(retries=0)
    drive.run(job)
    drive.tell(exited(job))
    drive.wait(SECOND)
    drive.run(job)
    for _ in range(5):
        told = exited(job, cause="configuration")
        drive.tell(structs.replace(told, detail="cannot enter the folder /jobs/x"))
        assert job.why.code == "storage_wait"
        drive.settle(job)
        drive.run(job)
    assert job.state == "running"


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


def test_steps_that_a_rollback_lost_do_not_count_as_unsaved() -> None:
    drive = Drive()
    job = drive.running(steps=100)
    every = job.spec.expected.checkpoint_steps
    job.step = 100 + 9 * every  # as far as it came before it went back
    told = Progress(
        job=job.id,
        generation=job.generation,
        step=100 + every // 2,
        durable=100,
        committed=100,
        at_ns=drive.now_ns,
    )
    drive.tell(told)
    assert not [n for n in drive.bodies(Notify) if n.reason.code == "unsaved"]


def test_a_job_that_is_killed_again_and_again_without_progress_takes_a_breath_and_goes_on() -> None:
    drive = Drive()
    job = drive.running()
    pauses = []
    for _ in range(20):
        drive.tell(exited(job, cause="worker_killed"), SECOND)
        began = drive.now_ns
        drive.settle(job)
        pauses.append((drive.now_ns - began) // SECOND)
        drive.run(job)
    assert job.state == "running" and job.retries_used == 0
    assert pauses[:7] == [pauses[0]] * 7 and pauses[0] <= 1
    assert 25 <= pauses[-1] <= 35
    drive.train(job, 10)  # progress: from now on it is recovered from at once again
    drive.tell(exited(job, cause="worker_killed"), SECOND)
    began = drive.now_ns
    drive.settle(job)
    assert (drive.now_ns - began) // SECOND <= 1
