"""What a program prints of its steps is shown and accounted for, and judges nobody."""

from __future__ import annotations

from phalanx.cluster.jobs.job import ClusterJob, GangShape
from phalanx.cluster.protocol.commands import Go
from phalanx.cluster.protocol.events import Progress
from phalanx.cluster.protocol.messages import StepsPrinted, WorkerExited
from tests.cluster.drive import SECOND, Drive

ONE = GangShape(slot_gpus=8)


def say(drive: Drive, job: ClusterJob, step: int, after_ns: int, **fields: int) -> None:
    drive.wait(after_ns)
    fact = StepsPrinted(
        node=job.placement.nodes[0],
        job=job.id,
        generation=job.generation,
        step=step,
        at_ns=drive.now_ns,
        **fields,
    )
    drive.tell(fact)


def buckets(drive: Drive, job: ClusterJob) -> dict[str, int]:
    drive.core.ledger.check(drive.core.view)
    account = drive.core.ledger.accounts[job.id]
    return {name: gpu_ns // 8 // SECOND for name, gpu_ns in account.buckets.items()}


def started(drive: Drive) -> ClusterJob:
    job = drive.submit(gang=ONE, reports_steps=False)
    drive.run(job)
    return job


def test_printed_steps_are_productive_and_what_is_before_and_after_them_unreported() -> None:
    drive = Drive()
    job = started(drive)
    say(drive, job, 10, 30 * SECOND)  # nobody knows how long the ten took
    say(drive, job, 20, 20 * SECOND, steps=100)
    say(drive, job, 30, 20 * SECOND, steps=100)
    assert job.printed_step_ns == 2 * SECOND and job.printed.steps == 100
    assert (job.step, job.step_ns, job.committed) == (0, 0, 0)  # nothing else follows from it
    drive.wait(5 * SECOND)
    killed = WorkerExited(
        job=job.id, generation=1, node=job.placement.nodes[0], rank=0, cause="worker_killed"
    )
    drive.tell(killed)
    spent = buckets(drive, job)
    assert spent["productive"] == 40 and spent["unreported"] == 35
    assert "detection" not in spent


def test_a_program_that_goes_on_by_itself_loses_only_what_it_does_again() -> None:
    drive = Drive()
    job = started(drive)
    say(drive, job, 1, SECOND)
    say(drive, job, 21, 40 * SECOND)
    drive.tell(
        WorkerExited(
            job=job.id, generation=1, node=job.placement.nodes[0], rank=0, cause="worker_killed"
        )
    )
    drive.settle(job)
    drive.run(job)
    assert buckets(drive, job)["productive"] == 40
    say(drive, job, 11, 10 * SECOND)  # from its own checkpoint of step 10
    spent = buckets(drive, job)
    assert spent["productive"] == 20 and spent["recompute"] == 20
    say(drive, job, 21, 20 * SECOND)
    assert buckets(drive, job)["productive"] == 40


def test_steps_that_were_said_before_or_by_others_count_for_nothing() -> None:
    drive = Drive()
    job = started(drive)
    say(drive, job, 10, SECOND)
    say(drive, job, 9, SECOND)
    other = next(n for n in range(8) if n not in job.placement.nodes)
    drive.tell(StepsPrinted(node=other, job=job.id, generation=1, step=99, at_ns=drive.now_ns))
    drive.tell(StepsPrinted(node=0, job=job.id, generation=0, step=99, at_ns=drive.now_ns))
    assert job.printed.step == 10
    drive.tell(StepsPrinted(node=0, job=job.id, generation=1, step=-1, at_ns=drive.now_ns))
    assert job.printed.step == 10


def test_a_trainer_that_reports_its_steps_is_not_read() -> None:
    drive = Drive()
    job = drive.running(10, gang=ONE)
    say(drive, job, 99, SECOND)
    assert job.printed is None and job.step == 10


def test_a_reported_step_of_a_program_is_not_as_long_as_its_start() -> None:
    drive = Drive()
    job = started(drive)
    for step in (10, 20, 30):
        passed = 60 * SECOND if step == 10 else 5 * SECOND
        fact = Progress(
            job=job.id,
            generation=1,
            step=step,
            committed=0,
            durable=0,
            at_ns=drive.now_ns + passed,
        )
        drive.tell(fact, passed)
    assert job.step_ns == SECOND // 2 and job.first_step_ns == 60 * SECOND


def test_a_program_that_was_started_again_goes_on_from_where_it_knows_and_not_from_step_0() -> None:
    drive = Drive()
    job = started(drive)
    killed = WorkerExited(
        job=job.id, generation=1, node=job.placement.nodes[0], rank=0, cause="worker_killed"
    )
    drive.tell(killed, 60 * SECOND)
    drive.settle(job)
    drive.run(job)
    assert "goes on from what it saved itself" in str(job.why)
    told = [str(each.reason) for each in drive.bodies(Go)]
    assert told == ["all ranks of its program may start"] * 2  # and none has restored step 0


def test_a_failure_of_a_program_without_steps_is_at_no_step() -> None:
    drive = Drive()
    job = started(drive)
    node = job.placement.nodes[0]
    for generation in (1, 2, 3):
        assert not job.ended
        drive.tell(
            WorkerExited(job=job.id, generation=generation, node=node, rank=0, cause="user_error")
        )
        drive.settle(job)
        if not job.ended:
            drive.run(job)
    assert job.evidence == ("user_error",) * 3
    assert str(job.why).startswith("failed 3 times in a row the same way")
