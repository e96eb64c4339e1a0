"""How long a gang may be quiet, and what a verdict says."""

from __future__ import annotations

import pytest
from msgspec import structs

from phalanx.cluster.jobs.job import GangShape, JobSpec, JobTimeouts, Placement
from phalanx.cluster.policy import Policy, TimeoutPolicy
from phalanx.cluster.protocol.commands import Notify
from phalanx.cluster.protocol.events import NoProgress
from phalanx.cluster.protocol.messages import Activity, Busy
from phalanx.cluster.protocol.step_watch import StepWatch
from phalanx.cluster.protocol.timeouts import fixed_limits, hang_limits
from tests.cluster.drive import SECOND, Drive

MINUTE = 60 * SECOND
TRAINER = JobSpec(name="own")
PROGRAM = JobSpec(name="program", reports_steps=False)
SHAPE, PLACEMENT = GangShape(replicas=2, slot_gpus=1), Placement((0, 1), (), replicas=2)


# Limits.


@pytest.mark.parametrize("spec", [TRAINER, PROGRAM], ids=["trainer", "program"])
def test_the_first_step_of_a_job_has_tens_of_minutes(spec: JobSpec) -> None:
    limit = hang_limits(TimeoutPolicy(), spec).first_step
    assert limit.ns == 30 * MINUTE and limit.setting == "timeouts.first_step_ns"


def test_later_first_steps_of_the_trainer_are_measured_by_the_longest_so_far() -> None:
    limit = hang_limits(TimeoutPolicy(), TRAINER, SECOND, 40 * SECOND).first_step
    assert 200 * SECOND <= limit.ns < 220 * SECOND and limit.setting == "timeouts.hang_steps"
    slow = hang_limits(TimeoutPolicy(), TRAINER, SECOND, 20 * MINUTE).first_step
    assert slow.ns == 30 * MINUTE


def test_a_program_loads_its_state_before_a_later_first_step_so_it_keeps_its_allowance() -> None:
    assert hang_limits(TimeoutPolicy(), PROGRAM, SECOND, SECOND).first_step.ns == 30 * MINUTE


def test_a_program_may_evaluate_and_save_between_two_steps() -> None:
    assert hang_limits(TimeoutPolicy(), TRAINER, SECOND).step.ns == MINUTE
    limit = hang_limits(TimeoutPolicy(), PROGRAM, SECOND).step
    assert limit.ns == 10 * MINUTE and limit.setting == "timeouts.least_program_hang_ns"
    assert hang_limits(TimeoutPolicy(), PROGRAM, 5 * MINUTE).step.ns > 25 * MINUTE


def test_a_first_step_has_no_less_than_a_later_one() -> None:
    limit = hang_limits(TimeoutPolicy(first_step_ns=SECOND), TRAINER).first_step
    assert limit.ns == MINUTE and limit.setting == "timeouts.least_hang_ns"


def test_what_a_job_says_itself_counts() -> None:
    asked = JobTimeouts(first_step_ns=MINUTE, hang_ns=2 * MINUTE, idle_ns=3 * MINUTE)
    limits = hang_limits(TimeoutPolicy(), structs.replace(PROGRAM, timeouts=asked), SECOND, SECOND)
    found = [(limit.ns, limit.setting) for limit in structs.astuple(limits)]
    assert found == [
        (MINUTE, "the job's first_step_ns"),
        (2 * MINUTE, "the job's hang_ns"),
        (2 * MINUTE, "the job's first_step_ns"),
        (3 * MINUTE, "the job's idle_ns"),
    ]


# Watching.


def watch_program(**options: bool) -> StepWatch:
    watch = StepWatch()
    watch.begin(1, 1, SHAPE, PLACEMENT, fixed_limits(MINUTE), 0, reports=False, **options)
    return watch


def done(node: int, cpu_ns: int = 0, output: int = 0, gpu: int = -1) -> Activity:
    return Activity(node=node, job=1, generation=1, cpu_ns=cpu_ns, output_bytes=output, gpu_ppm=gpu)


def test_a_program_without_steps_is_not_judged_before_anything_is_known_of_it() -> None:
    assert watch_program().next_deadline_ns() is None


@pytest.mark.parametrize(
    "sign", [{"cpu_ns": SECOND}, {"output": 1}, {"gpu": 50_000}], ids=["cpu", "output", "gpu"]
)
def test_any_activity_of_any_node_keeps_a_program_alive(sign: dict[str, int]) -> None:
    watch = watch_program()
    for at in range(40):
        watch.active(done(0), at * 10 * SECOND)
        watch.active(
            done(1, **{name: value * at for name, value in sign.items()}), at * 10 * SECOND
        )
        assert watch.due(at * 10 * SECOND) == []


def test_a_program_that_does_nothing_is_said_once_with_what_was_measured() -> None:
    watch = watch_program()
    found: list[NoProgress] = []
    for at in range(40):
        for node in (0, 1):
            watch.active(done(node, cpu_ns=at * 1_000_000), at * 10 * SECOND)
        found.extend(f for f in watch.due(at * 10 * SECOND) if isinstance(f, NoProgress))
    (fact,) = found
    assert (fact.limit, fact.limit_ns, fact.quiet_ns) == ("idle", MINUTE, MINUTE)
    assert 0 < fact.cpu_ns < SECOND and fact.output_bytes == 0
    watch.active(done(0, output=5), 500 * SECOND)
    watch.active(done(0, output=5), 560 * SECOND)
    assert watch.due(560 * SECOND) == [], "the other node may have done something"
    watch.active(done(1), 561 * SECOND)
    assert len(watch.due(561 * SECOND)) == 1


def test_a_program_that_says_that_it_reports_has_the_allowance_of_a_first_step() -> None:
    watch = StepWatch()
    limits = hang_limits(TimeoutPolicy(), PROGRAM)
    watch.begin(1, 1, SHAPE, PLACEMENT, lambda _: limits, 0, reports=False)
    watch.active(structs.replace(done(0), reports_steps=True), 20 * SECOND)
    assert watch.due(30 * MINUTE - 1) == []
    (fact,) = watch.due(30 * MINUTE)
    assert isinstance(fact, NoProgress) and fact.limit == "first_step"
    watch.alive(1, 1, 1, 31 * MINUTE)
    assert watch.next_deadline_ns() == 41 * MINUTE


def test_a_step_that_was_only_restored_is_no_first_step() -> None:
    watch = StepWatch()
    limits = hang_limits(TimeoutPolicy(), TRAINER, SECOND, 40 * SECOND)
    watch.begin(1, 2, SHAPE, PLACEMENT, lambda _: limits, 0)
    watch.restored(1, 2, 20)
    assert watch.next_deadline_ns() == limits.first_step.ns > MINUTE
    watch.alive(1, 2, 20, SECOND)
    assert watch.next_deadline_ns() == limits.first_step.ns
    watch.alive(1, 2, 21, 2 * SECOND)
    assert watch.next_deadline_ns() == 2 * SECOND + MINUTE


def test_a_validation_or_a_checkpoint_has_the_allowance_of_a_first_step() -> None:
    watch = StepWatch()
    limits = hang_limits(TimeoutPolicy(), TRAINER, SECOND, SECOND)
    watch.begin(1, 1, SHAPE, PLACEMENT, lambda _: limits, 0)
    watch.alive(1, 1, 7, 10 * SECOND)
    watch.busy(Busy(node=0, job=1, generation=1, step=8, what="a validation"), 20 * SECOND)
    assert watch.next_deadline_ns() == 20 * SECOND + 30 * MINUTE
    watch.alive(1, 1, 8, 25 * SECOND)  # that it was made is heard of a little later
    assert watch.next_deadline_ns() == 25 * SECOND + 30 * MINUTE
    (fact,) = watch.due(25 * SECOND + 30 * MINUTE)
    assert isinstance(fact, NoProgress) and (fact.limit, fact.phase) == ("phase", "a validation")
    watch.alive(1, 1, 9, 40 * MINUTE)
    assert watch.next_deadline_ns() == 41 * MINUTE


# Verdicts.


def verdict(limit: str, **facts: int) -> NoProgress:
    measured = {"quiet_ns": 61 * SECOND, "cpu_ns": 200_000_000, "output_bytes": 0, **facts}
    return NoProgress(
        job=1,
        generation=1,
        step=0,
        limit=limit,  # type: ignore[arg-type]
        limit_ns=MINUTE,
        setting="timeouts.x_ns",
        **measured,  # type: ignore[arg-type]
    )


def running(spec: JobSpec, policy: Policy | None = None) -> Drive:
    drive = Drive(2, policy)
    asked = {"reports_steps": spec.reports_steps, "timeouts": spec.timeouts}
    drive.run(drive.submit(gang=SHAPE, **asked))
    return drive


def told(drive: Drive, fact: NoProgress) -> list[str]:
    commands = drive.tell(fact)
    return [str(c.body.reason) for c in commands if isinstance(c.body, Notify)]


def test_a_program_that_is_idle_is_told_of_and_left_alone() -> None:
    drive = running(PROGRAM)
    (text,) = told(drive, verdict("idle"))
    assert "no activity for 61.0 s; 60.0 s are allowed by timeouts.x_ns" in text
    assert "0.2 s of CPU time, 0 bytes of output" in text and "left alone" in text
    assert drive.core.view.jobs[1].state == "running"


@pytest.mark.parametrize("who", ["job", "policy"])
def test_a_program_that_is_idle_is_restarted_where_somebody_asked_for_that(who: str) -> None:
    spec, policy = PROGRAM, Policy()
    if who == "job":
        spec = structs.replace(spec, timeouts=JobTimeouts(idle_ns=MINUTE))
    else:
        policy = Policy(timeouts=TimeoutPolicy(idle_restart=True))
    drive = running(spec, policy)
    (text,) = told(drive, verdict("idle"))
    assert "Phalanx ends its processes" in text
    job = drive.core.view.jobs[1]
    assert job.state == "forming" and job.gang is not None and job.gang.cause == "no_progress"


def test_a_verdict_names_setting_and_evidence_and_who_kills() -> None:
    drive = running(TRAINER)
    (text,) = told(drive, verdict("first_step"))
    assert "no step after step 0 (nobody is behind)" in text
    assert "the first of this start, for 61.0 s; 60.0 s are allowed by timeouts.x_ns" in text
    assert text.endswith("Phalanx ends its processes and starts them again")
    job = drive.core.view.jobs[1]
    assert "worker_killed" not in " ".join(job.evidence) and "timeouts.x_ns" in job.evidence[-1]
    assert job.gang is not None and job.gang.cause == "no_progress"


def test_hangs_at_one_step_are_alike_whatever_was_measured_meanwhile() -> None:
    drive = running(TRAINER)
    job = drive.core.view.jobs[1]
    for attempt in range(3):
        fact = structs.replace(
            verdict("first_step", cpu_ns=attempt * SECOND), generation=job.generation
        )
        drive.tell(fact)
        if job.state == "failed":
            break
        drive.wait(MINUTE)
        drive.run(job)
    assert attempt == 2 and job.why.code == "same_step"
