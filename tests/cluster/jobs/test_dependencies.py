"""What a job waits for that is to start where others fail."""

from __future__ import annotations

import pytest

from phalanx.cluster.core import Core
from phalanx.cluster.job_relations import Array, Dependency
from phalanx.cluster.jobs import dependencies
from phalanx.cluster.jobs.job import ClusterJob, GangShape, JobSpec
from phalanx.cluster.protocol.commands import Notify, Refuse
from phalanx.cluster.protocol.events import Cancel, JobFinished, Step, Submit, SubmitWorkflow
from tests.cluster.drive import EXPECTED, SECOND, Drive
from tests.cluster.invariants import check

ONE = GangShape(replicas=1, tensor=8, slot_gpus=8, slot_cpus=8)


def end(drive: Drive, job: ClusterJob, *, well: bool) -> None:
    if well:
        drive.run(job)
        drive.tell(JobFinished(job=job.id, generation=job.generation, step=job.step))
    else:
        drive.tell(Cancel(job=job.id))
    drive.wait(SECOND)


@pytest.mark.parametrize(
    ("kind", "well", "state", "said"),
    [
        ("afternotok", False, "forming", ""),
        ("afternotok", True, "pending", "can never start: job 1, which must fail first, succeeded"),
        ("afterok", True, "forming", ""),
        ("afterok", False, "pending", "can never start: job 1, which must succeed first"),
        ("afterany", False, "forming", ""),
        ("afterany", True, "forming", ""),
    ],
)
def test_what_becomes_of_a_job_decides_about_those_that_wait_for_it(kind, well, state, said):
    drive = Drive()
    first = drive.submit(gang=ONE)
    waiting = drive.submit(gang=ONE, after=(Dependency(kind, first.id),))
    assert waiting.state == "pending"
    end(drive, first, well=well)
    assert waiting.state == state and said in str(waiting.why)
    assert waiting.never == (state == "pending")
    late = drive.submit(gang=ONE, after=(Dependency(kind, first.id),))
    assert late.state == state and late.never == waiting.never


@pytest.mark.parametrize(("failures", "starts"), [(0, False), (1, True), (3, True)])
def test_one_failure_in_an_array_is_enough(failures, starts):
    drive = Drive()
    first = drive.submit(gang=ONE, array=Array(3))
    waiting = drive.submit(gang=ONE, after=(Dependency("afternotok", first.id),))
    members = [drive.core.view.jobs[first.id + index] for index in range(3)]
    for index, job in enumerate(members):
        assert waiting.state == "pending" and not waiting.never
        end(drive, job, well=index >= failures)
    assert (waiting.state == "forming", waiting.never) == (starts, not starts)


def test_a_dependency_that_is_given_many_times_is_looked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drive, looked = Drive(), 0
    members = dependencies.members

    def counted(*arguments: object) -> list[ClusterJob]:
        nonlocal looked
        looked += 1
        return members(*arguments)

    first = drive.submit(gang=ONE, array=Array(5), held=True)
    monkeypatch.setattr(dependencies, "members", counted)
    after = (Dependency("afterany", first.id), Dependency("afterok", first.id)) * 500
    waiting = drive.submit(gang=ONE, after=after)
    assert looked <= 4, "each of a thousand is the whole array"
    assert waiting.spec.after == after[:2] and len(waiting.waiting_for) == 5


def test_the_pairs_of_jobs_that_wait_for_each_other_are_bounded_by_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dependencies, "MOST_AWAITED_OF_USER", 30)
    drive = Drive()
    first = drive.submit(gang=ONE, array=Array(10), held=True, user="ann")
    after = (Dependency("afterany", first.id),)
    for _ in range(3):
        drive.submit(gang=ONE, after=after, user="ann")
    spec = JobSpec(name="more", gang=ONE, expected=EXPECTED, after=after, user="ann")
    (refused,) = drive.tell(Submit(spec=spec, request="r"))
    assert isinstance(refused.body, Refuse) and "30 others in all" in str(refused.body.reason)
    assert drive.submit(gang=ONE, after=after, user="bob").waiting_for
    drive.core = Core.restore(drive.core.snapshot())
    check(drive.core)
    drive.tell(Cancel(job=first.id))
    drive.submit(gang=ONE, user="ann", after=(Dependency("afterany", 2),))
    check(drive.core)
    drive.tell(Cancel(job=2, array=True))
    check(drive.core)
    assert not drive.core._ctx.awaited_of


def test_who_waits_for_one_that_can_never_start_says_so_until_that_one_is_gone() -> None:
    drive = Drive()
    failing, plain = drive.submit(gang=ONE, held=True), drive.submit(gang=ONE, held=True)
    stuck = drive.submit(gang=ONE, after=(Dependency("afterok", failing.id),))
    after = tuple(Dependency("afterany", number) for number in (plain.id, stuck.id))
    waiting = drive.submit(gang=ONE, after=after)
    assert "waits for other jobs (2), the first is 2" in str(waiting.why)
    drive.tell(Cancel(job=failing.id))
    said = f"waits for job {stuck.id}, which can never start: cancel that one"
    assert stuck.never and str(waiting.why) == said
    drive.tell(Cancel(job=plain.id))
    assert str(waiting.why) == said
    drive.tell(Cancel(job=stuck.id))
    drive.wait(SECOND)
    assert waiting.state == "forming"


def test_a_job_that_many_ways_lead_to_is_given_up_once() -> None:
    drive = Drive()
    one = JobSpec(name="one", gang=ONE, expected=EXPECTED)
    steps = tuple(
        Step(
            name=str(number),
            spec=one,
            after=tuple(("afterok", str(other)) for other in range(max(0, number - 4), number)),
        )
        for number in range(60)
    )
    drive.tell(SubmitWorkflow(steps=steps))
    told = [command.body for command in drive.tell(Cancel(job=1))]
    never = [
        body for body in told if isinstance(body, Notify) and "can never start" in str(body.reason)
    ]
    assert all(job.never for job in drive.core.view.jobs.values() if job.id > 1)
    assert [body.job for body in never] == list(range(2, 61))
