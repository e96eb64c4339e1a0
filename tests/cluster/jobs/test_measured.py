"""What is measured of a job replaces what was planned of it, and is marked."""

from __future__ import annotations

from phalanx.cluster.core import Core
from phalanx.cluster.jobs.job import Expected
from phalanx.cluster.jobs.measured import expected_now
from phalanx.cluster.ledger.report import report
from phalanx.cluster.plan_record import PlanRecord
from phalanx.cluster.policy import Policy, PricePolicy
from phalanx.cluster.protocol.events import JobFinished, Progress
from phalanx.cluster.protocol.messages import WorkerExited
from tests.cluster.drive import SECOND, SHAPE, Drive

EXPECTED = Expected(
    steps=1000,
    step_ns=5 * SECOND,
    exposed_ns=SECOND,
    bubble_ns=SECOND // 2,
    checkpoint_steps=100,
    start_ns=30 * SECOND,
    standby_ns=15 * SECOND,
)
START = 3 * SECOND - Policy().queue.delay_ns  # as Drive lets it take
PLAN = PlanRecord(device="h100", origins={"steps": "job", "step_ns": "planned"})


def test_a_start_and_a_formation_replace_what_was_planned() -> None:
    drive = Drive()
    job = drive.running(expected=EXPECTED, plan=PLAN)
    assert job.spec.expected == EXPECTED, "deadlines stay those of the submission"
    assert (job.expected.start_ns, job.expected.form_ns) == (START, SECOND)
    assert job.measured == ("form_ns", "start_ns")
    drive.train(job, 100, flush_ns=7 * SECOND)
    assert job.expected.flush_ns == 7 * SECOND and "flush_ns" in job.measured
    expected, origins = expected_now(job)
    assert expected.step_ns == job.step_ns
    assert (origins["step_ns"], origins["start_ns"]) == ("measured", "measured")
    assert (origins["steps"], origins["standby_ns"]) == ("job", "default")


def test_a_restart_is_told_from_a_start() -> None:
    drive = Drive()
    job = drive.running(expected=EXPECTED, plan=PLAN)
    node = job.placement.nodes[0]
    exited = WorkerExited(
        job=job.id, generation=1, node=node, rank=0, cause="worker_killed", step=150
    )
    drive.tell(exited)
    drive.settle(job)
    drive.run(job)
    assert 2 * SECOND <= job.expected.standby_ns < 3 * SECOND
    assert job.expected.start_ns == START
    assert job.expected.restore_peer_ns == 1, "restoring took as long as forming alone"


def test_a_job_that_nobody_planned_learns_nothing() -> None:
    drive = Drive()
    job = drive.running(expected=EXPECTED)
    assert job.revised is None and job.measured == () and job.expected == EXPECTED


def test_what_was_measured_survives_a_snapshot_of_the_core() -> None:
    drive = Drive()
    job = drive.running(expected=EXPECTED, plan=PLAN)
    again = Core.restore(drive.core.snapshot()).view.jobs[job.id]
    assert (again.expected, again.measured) == (job.expected, job.measured)


def test_exposed_communication_and_bubble_follow_measured_steps_and_the_ledger_sums() -> None:
    drive = Drive()
    job = drive.submit(expected=EXPECTED, plan=PLAN, gang=SHAPE)
    drive.run(job)
    for step in range(1, 41):  # twice as slow as planned
        made = Progress(
            job=job.id,
            generation=1,
            step=step,
            committed=step,
            durable=0,
            at_ns=drive.now_ns + 10 * SECOND,
        )
        drive.tell(made, 10 * SECOND)
    drive.tell(JobFinished(job=job.id, generation=1, step=40))
    found = report(drive.core.ledger, PricePolicy()).jobs[job.id]
    assert found.buckets["exposed_communication"] == (SECOND + 39 * 2 * SECOND) * 16
    assert found.buckets["bubble"] == (SECOND // 2 + 39 * SECOND) * 16
    assert sum(found.buckets.values()) == found.gpu_ns == (drive.now_ns - job.started_ns) * 16
