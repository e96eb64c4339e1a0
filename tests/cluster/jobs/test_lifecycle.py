from __future__ import annotations

import pytest
from msgspec import structs

from phalanx.cluster.job_relations import Array, Dependency
from phalanx.cluster.jobs.job import Expected, GangShape, JobSpec
from phalanx.cluster.ledger.report import report
from phalanx.cluster.policy import Policy, QueuePolicy, UserPolicy
from phalanx.cluster.protocol.commands import Accept, Drain, Notify, Refuse, Stop
from phalanx.cluster.protocol.events import (
    Cancel,
    GangDrained,
    GangJoined,
    GangReady,
    Hold,
    JobFinished,
    RaiseBudget,
    Requeue,
    Step,
    Submit,
    SubmitWorkflow,
)
from phalanx.cluster.protocol.messages import WorkerExited
from tests.cluster.drive import EXPECTED, SECOND, SHAPE, Drive

ONE = GangShape(replicas=1, tensor=8, slot_gpus=8, slot_cpus=8)


def finish(drive: Drive, job) -> None:
    if job.state == "forming":
        drive.run(job)
    drive.tell(JobFinished(job=job.id, generation=job.generation, step=job.step))


def dies(drive: Drive, job) -> None:
    node, generation = job.placement.nodes[0], job.generation
    fact = WorkerExited(job=job.id, generation=generation, node=node, rank=0, cause="worker_killed")
    drive.tell(fact)


def refused(drive: Drive, **fields) -> str:
    spec = JobSpec(**{"name": "job", "gang": SHAPE, "expected": EXPECTED, **fields})
    (command,) = drive.tell(Submit(spec=spec, request="ask"))
    assert isinstance(command.body, Refuse) and command.body.request == "ask"
    return str(command.body.reason)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": ""}, "must be a folder's name"),
        ({"name": "../../etc"}, "no slash, no leading dot (nearest: "),
        ({"name": "a\x1b[2Jb"}, "must be text without control characters"),
        ({"name": "x" * 201}, "at most 200 bytes"),
        ({"gang": GangShape(replicas=0)}, "gang.replicas = 0: must be at least 1"),
        ({"gang": GangShape(replicas=2, least_replicas=3)}, "must not be above gang.replicas"),
        ({"gang": GangShape(slot_gpus=-1)}, "gang.slot_gpus = -1"),
        ({"expected": Expected(step_ns=0)}, "expected.step_ns = 0"),
        ({"expected": Expected(restore_disk_ns=-1)}, "expected.restore_disk_ns = -1"),
        ({"time_limit_ns": -1}, "time_limit_ns = -1"),
        ({"retries": -1}, "retries = -1"),
        ({"array": Array(0)}, "array.count = 0"),
        ({"array": Array(5, -1)}, "array.width = -1"),
        ({"array": Array(5, step=0)}, "array.step = 0: must be at least 1"),
        ({"array": Array(5, first=-3)}, "array.first = -3: indices are 0 to"),
        ({"project": "a\nb"}, "project = "),
        ({"constraint": "h100 &"}, "a feature is missing"),
        ({"constraint": "h10"}, 'did you mean "h100"?'),
        ({"after": (Dependency("afterok", 99),)}, "depends on job 99, which does not exist"),
        (
            {"budget_gpu_seconds": 3600, "expected": Expected(steps=10**6)},
            "would take about 4444 GPU-hours and the budget is 1:",
        ),
    ],
)
def test_a_submission_that_makes_no_sense_is_refused_with_the_reason(fields, said):
    assert said in refused(Drive(), **fields)


@pytest.mark.parametrize(
    ("policy", "user", "said"),
    [
        (
            Policy(users=UserPolicy(most_jobs=3)),
            "ann",
            "user ann has 2 jobs that have not ended: 2",
        ),
        (Policy(users=UserPolicy(most_jobs=3)), "bob", ""),
        (Policy(queue=QueuePolicy(most_jobs=3)), "bob", "(policy: queue.most_jobs)"),
        (
            Policy(queue=QueuePolicy(most_array=1)),
            "bob",
            "must be 1 to 1 (policy: queue.most_array)",
        ),
    ],
)
def test_jobs_of_a_user_of_all_and_of_an_array_are_bounded_by_the_policy(policy, user, said):
    drive = Drive(policy=policy)
    drive.submit(gang=ONE, user="ann")
    ended = drive.submit(gang=ONE, user="ann")
    drive.submit(gang=ONE, user="ann")
    drive.tell(Cancel(job=ended.id))
    drive.wait(SECOND)
    spec = JobSpec(name="more", gang=ONE, expected=EXPECTED, user=user, array=Array(2))
    answers = [command.body for command in drive.tell(Submit(spec=spec, request="ask"))]
    refusals = [str(each.reason) for each in answers if isinstance(each, Refuse)]
    assert len(refusals) == bool(said) and all(said in each for each in refusals)


@pytest.mark.parametrize(
    "policy", [Policy(users=UserPolicy(most_jobs=5)), Policy(queue=QueuePolicy(most_jobs=5))]
)
def test_the_jobs_of_a_workflow_are_bounded_together(policy):
    drive = Drive(policy=policy)
    drive.submit(gang=ONE, user="ann")
    one = JobSpec(name="one", gang=ONE, expected=EXPECTED, user="ann")
    two = structs.replace(one, array=Array(2))
    for steps, accepted in (((one, two, two), False), ((two, two), True), ((one,), False)):
        order = SubmitWorkflow(steps=tuple(Step(name=str(n), spec=s) for n, s in enumerate(steps)))
        bodies = [command.body for command in drive.tell(order)]
        assert any(isinstance(body, Accept) for body in bodies) == accepted
        assert accepted or "that have not ended" in str(bodies[0].reason)
    assert len(drive.core.view.jobs) == 5


def test_a_job_larger_than_the_fleet_is_refused():
    drive = Drive(4)
    refused(drive, gang=GangShape(replicas=5, tensor=8, slot_gpus=8))
    assert not drive.core.view.jobs


def test_a_forced_job_may_exceed_its_budget():
    drive = Drive()
    job = drive.submit(budget_gpu_seconds=3600, expected=Expected(steps=10**6), forced=True)
    assert job.state == "forming"


def test_afterok_waits_for_success():
    drive = Drive()
    first = drive.submit(gang=ONE)
    second = drive.submit(gang=ONE, after=(Dependency("afterok", first.id),))
    assert (second.state, second.eligible) == ("pending", False)
    assert str(second.why) == f"waits for other jobs (1), the first is {first.id}"
    finish(drive, first)
    drive.wait(SECOND)
    assert second.state == "forming"


def test_afterok_of_a_failed_job_can_never_be_satisfied_and_says_so():
    drive = Drive()
    first = drive.submit(gang=ONE)
    second = drive.submit(gang=ONE, after=(Dependency("afterok", first.id),))
    third = drive.submit(gang=ONE, after=(Dependency("afterany", first.id),))
    drive.tell(Cancel(job=first.id))
    drive.wait(SECOND)
    assert second.state == "pending" and "can never start" in str(second.why)
    assert any("can never start" in str(n.reason) for n in drive.bodies(Notify))
    assert third.state == "forming"
    late = drive.submit(gang=ONE, after=(Dependency("afterok", first.id),))
    assert "can never start" in str(late.why)


def test_who_waits_for_a_job_that_can_never_start_is_told_and_freed_by_its_cancellation():
    drive = Drive()
    first = drive.submit(gang=ONE)
    second = drive.submit(gang=ONE, after=(Dependency("afterok", first.id),))
    third = drive.submit(gang=ONE, after=(Dependency("afterok", second.id),))
    chain = [third]
    for _ in range(1500):
        chain.append(drive.submit(gang=ONE, after=(Dependency("afterok", chain[-1].id),)))
    patient = drive.submit(gang=ONE, after=(Dependency("afterany", third.id),))
    drive.tell(Cancel(job=first.id))
    assert second.never and all(job.never for job in chain)
    assert "can itself never start" in str(third.why)
    assert not patient.never and f"job {third.id}, which can never start" in str(patient.why)
    late = drive.submit(gang=ONE, after=(Dependency("afterok", third.id),))
    assert late.never and "can itself never start" in str(late.why)
    drive.tell(Cancel(job=third.id))
    drive.wait(SECOND)
    assert patient.state == "forming"


def test_members_of_a_singleton_array_run_one_after_another():
    drive = Drive(8)
    first = drive.submit(
        name="nightly", user="ada", gang=ONE, after=(Dependency("singleton"),), array=Array(4, 3)
    )
    later = drive.submit(name="nightly", user="ada", gang=ONE, after=(Dependency("singleton"),))
    jobs = [drive.core.view.jobs[first.id + index] for index in range(4)]

    def running() -> list[int]:
        return [job.array_index for job in jobs if job.placement is not None]

    assert running() == [0] and "at most 1 jobs at a time" in str(jobs[1].why)
    drive.tell(Cancel(job=jobs[2].id))  # its turn had not come
    drive.wait(SECOND)
    assert running() == [0]
    for index, following in ((0, [1]), (1, [3]), (3, [])):
        assert later.placement is None
        drive.tell(Cancel(job=jobs[index].id))
        drive.wait(SECOND)
        assert running() == following
    assert later.placement is not None


def test_a_singleton_waits_for_its_namesakes():
    drive = Drive()
    spec = {"name": "nightly", "user": "ada", "gang": ONE, "after": (Dependency("singleton"),)}
    first, second, third = (drive.submit(**spec) for _ in range(3))
    other = drive.submit(**{**spec, "user": "eve"})
    assert [job.state for job in (first, second, third)] == ["forming", "pending", "pending"]
    assert other.state == "forming"
    finish(drive, first)
    drive.wait(SECOND)
    assert [job.state for job in (second, third)] == ["forming", "pending"]


def test_an_array_runs_at_most_its_width_at_a_time():
    drive = Drive(8)
    first = drive.submit(gang=ONE, array=Array(5, 2))
    jobs = [drive.core.view.jobs[first.id + index] for index in range(5)]
    assert [job.state for job in jobs] == ["forming"] * 2 + ["pending"] * 3
    assert str(jobs[3].why) == "its array runs at most 2 jobs at a time"
    drive.tell(Cancel(job=jobs[2].id))  # one that has not been let in yet
    finish(drive, jobs[0])
    drive.wait(SECOND)
    assert [job.state for job in jobs[1:]] == ["forming", "cancelled", "forming", "pending"]


def test_an_array_that_waits_for_another_job_keeps_its_width():
    drive = Drive(8)
    first = drive.submit(gang=ONE)
    array = drive.submit(gang=ONE, array=Array(3, 1), after=(Dependency("afterok", first.id),))
    last = drive.submit(gang=ONE, after=(Dependency("afterok", array.id),))
    finish(drive, first)
    for index in range(3):
        drive.wait(SECOND)
        states = [drive.core.view.jobs[array.id + n].state for n in range(3)]
        assert states == ["done"] * index + ["forming"] + ["pending"] * (2 - index)
        assert last.state == "pending"
        finish(drive, drive.core.view.jobs[array.id + index])
    drive.wait(SECOND)
    assert last.state == "forming"


def workflow(*steps: tuple[str, tuple[str, ...]]) -> SubmitWorkflow:
    return SubmitWorkflow(
        steps=tuple(
            Step(
                name=name,
                spec=JobSpec(name=name, gang=ONE, expected=EXPECTED),
                after=tuple(("afterok", other) for other in after),
            )
            for name, after in steps
        ),
        request="flow",
    )


@pytest.mark.parametrize("succeeds", [True, False])
def test_a_cancelled_job_that_was_forgotten_is_not_told_that_what_it_waited_for_ended(
    succeeds: bool,
) -> None:
    drive = Drive(policy=Policy(ended_jobs=1))
    first = drive.running()
    waits = drive.submit(after=(Dependency(kind="afterok", job=first.id),))
    drive.tell(Cancel(job=waits.id))
    drive.tell(Cancel(job=drive.submit().id))
    assert waits.id not in drive.core.view.jobs
    if succeeds:
        drive.tell(JobFinished(job=first.id, generation=1, step=first.step))
    else:
        drive.tell(Cancel(job=first.id))
        drive.wait(3600 * SECOND)
    assert first.ended


def test_a_workflow_runs_in_the_order_of_its_dependencies():
    drive = Drive()
    drive.tell(workflow(("evaluate", ("train",)), ("train", ("prepare",)), ("prepare", ())))
    drive.wait(SECOND)
    jobs = {job.spec.name: job for job in drive.core.view.jobs.values()}
    assert [jobs[name].state for name in ("prepare", "train", "evaluate")] == [
        "forming",
        "pending",
        "pending",
    ]
    accepted = [body.job for body in drive.bodies(Accept)]
    assert accepted == [jobs[name].id for name in ("evaluate", "train", "prepare")]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([("a", ("b",)), ("b", ("c",)), ("c", ("b",))], "in a circle: b -> c -> b"),
        ([("a", ("a",))], "a -> a"),
        ([("a", ("x",))], 'job "a" waits for "x"'),
        ([("a", ()), ("a", ())], 'two jobs of the workflow are named "a"'),
    ],
)
def test_a_workflow_that_cannot_run_is_refused_as_a_whole(steps, said):
    drive = Drive()
    (command,) = drive.tell(workflow(*steps))
    assert isinstance(command.body, Refuse) and said in str(command.body.reason)
    assert not drive.core.view.jobs


def test_a_cancelled_job_is_stopped_everywhere_and_its_nodes_are_free():
    drive = Drive()
    job = drive.running()
    nodes = job.placement.nodes
    drive.tell(Cancel(job=job.id))
    assert job.state == "cancelled" and job.placement is None
    assert drive.sent[-3].target == nodes or any(
        isinstance(command.body, Stop) and command.target == nodes for command in drive.sent
    )
    assert sum(drive.core.view.fleet.idle_gpus) == drive.core.view.fleet.total_gpus
    (command,) = drive.tell(Cancel(job=job.id, request="again"))
    assert "has already ended (cancelled)" in str(command.body.reason)


def test_a_requeued_job_drains_and_comes_back_from_its_checkpoint():
    drive = Drive()
    job = drive.running(steps=150)
    drive.tell(Requeue(job=job.id))
    assert job.state == "draining" and drive.bodies(Drain)
    drive.tell(GangDrained(job=job.id, generation=1, step=151), SECOND)
    assert job.state == "pending"
    drive.wait(SECOND)
    drive.run(job, -1)
    assert (drive.last_restore().step, drive.last_restore().source) == (151, "remote")


def test_a_gang_that_does_not_drain_in_time_is_ended_anyway():
    drive = Drive()
    job = drive.running()
    drive.tell(Requeue(job=job.id))
    drive.wait(20 * SECOND)
    assert job.state == "draining"  # nobody else wants its nodes: it is given more time
    assert "drain_on" in [note.reason.code for note in drive.bodies(Notify)]
    drive.wait(40 * SECOND)
    assert job.state == "forming" and job.generation == 2
    assert job.durable == 100
    drive.run(job)  # it got the same nodes, which still have its newest steps
    assert (drive.last_restore().step, drive.last_restore().source) == (150, "peer")
    assert "given_up" not in [note.reason.code for note in drive.bodies(Notify)]


def test_a_drain_is_given_the_time_that_a_checkpoint_takes_to_arrive():
    drive = Drive()
    job = drive.running(expected=structs.replace(EXPECTED, flush_ns=60 * SECOND))
    drive.tell(Requeue(job=job.id))
    drive.tell(GangDrained(job=job.id, generation=1, step=151), 66 * SECOND)
    assert job.state == "pending" and job.durable == 151


def test_a_drained_job_waits_until_it_is_let_in_again():
    drive = Drive()
    job = drive.running(steps=150)
    drive.tell(Requeue(job=job.id, hold=True))
    drive.tell(GangDrained(job=job.id, generation=1, step=151), SECOND)
    drive.wait(10 * SECOND)
    assert job.state == "pending" and str(job.why) == "held by a person"
    drive.tell(Hold(job=job.id, held=False))
    drive.wait(SECOND)
    assert job.state == "forming"


@pytest.mark.parametrize("ready", [True, False], ids=["forms", "breaks-again"])
def test_a_gang_that_forms_at_its_time_limit_saves_what_it_has_in_memory(ready: bool):
    drive = Drive()
    job = drive.running(steps=150, time_limit_ns=3600 * SECOND, requeue_at_limit=True)
    drive.wait(job.started_ns + 3599 * SECOND - drive.now_ns)
    dies(drive, job)
    drive.wait(2 * SECOND)
    assert job.state == "forming" and job.generation == 2 and job.step > job.durable
    if ready:
        drive.tell(GangJoined(job=job.id, generation=2, step=job.step))
        drive.tell(GangReady(job=job.id, generation=2, step=job.step))
        assert job.state == "draining"
        drive.tell(GangDrained(job=job.id, generation=2, step=job.step))
    else:
        dies(drive, job)
        drive.wait(2 * SECOND)
        assert job.state == "forming" and job.generation == 3, "it tries once more, not for ever"
        dies(drive, job)
    assert job.state == "pending" and "time limit" in str(job.why)


def test_a_held_job_stays_out_of_the_queue():
    drive = Drive(2)
    first = drive.submit()
    second = drive.submit()
    drive.tell(Hold(job=second.id))
    finish(drive, first)
    drive.wait(SECOND)
    assert second.state == "pending" and str(second.why) == "held by a person"
    drive.tell(Hold(job=second.id, held=False))
    drive.wait(SECOND)
    assert second.state == "forming"
    (command,) = drive.tell(Hold(job=second.id))
    assert isinstance(command.body, Refuse)


def test_a_time_limit_gives_grace_and_ends_the_job():
    drive = Drive()
    job = drive.running(steps=10, time_limit_ns=3600 * SECOND)
    drive.wait(job.started_ns + 3600 * SECOND - drive.now_ns)
    assert job.state == "draining"
    drive.tell(GangDrained(job=job.id, generation=1, step=700))
    assert job.state == "failed" and "time limit of 3600 s" in str(job.why)


def test_a_job_may_go_back_into_the_queue_at_its_time_limit_again_and_again():
    drive = Drive()
    job = drive.running(steps=10, time_limit_ns=3600 * SECOND, requeue_at_limit=True)
    for generation in (1, 2):
        drive.wait(job.started_ns + 3605 * SECOND - drive.now_ns)
        assert job.state == "draining"
        fact = GangDrained(job=job.id, generation=job.generation, step=job.step, durable=True)
        drive.tell(fact, SECOND)
        drive.wait(SECOND)
        assert job.generation > generation
        drive.run(job)


def test_a_budget_warns_then_stops_the_job():
    drive = Drive()
    job = drive.submit(budget_gpu_seconds=16 * 1000)
    drive.run(job)
    drive.wait(850 * SECOND)
    assert any("80 % of its budget" in str(n.reason) for n in drive.bodies(Notify))
    assert job.state == "running"
    drive.wait(200 * SECOND)
    drive.wait(100 * SECOND)
    assert job.state == "failed" and "used its budget of 4.44 GPU-hours" in str(job.why)


def test_a_raised_budget_lets_the_job_go_on():
    drive = Drive()
    job = drive.submit(budget_gpu_seconds=16 * 1000)
    drive.run(job)
    drive.wait(900 * SECOND)
    drive.tell(RaiseBudget(job=job.id, budget_gpu_seconds=16 * 10_000))
    drive.wait(1000 * SECOND)
    assert job.state == "running"
    drive.tell(RaiseBudget(job=job.id, budget_gpu_seconds=1, forced=True))
    drive.wait(100_000 * SECOND)
    assert job.state == "running"


def test_the_same_step_failing_again_and_again_stops_the_job_with_the_evidence():
    drive = Drive()
    job = drive.running(retries=100)
    for _ in range(3):
        assert job.state == "running"
        drive.tell(
            WorkerExited(
                job=job.id,
                generation=job.generation,
                node=job.placement.nodes[0],
                rank=3,
                cause="user_error",
                detail="ValueError: bad sample",
            )
        )
        drive.wait(30 * SECOND)
        if job.gang.ending is None:
            drive.run(job)
    drive.save_and_leave(job)
    assert job.state == "failed" and job.durable == 150
    assert "failed 3 times in a row at step 150" in str(job.why)
    assert "ValueError: bad sample" in str(job.why)


@pytest.mark.parametrize(("generation", "state"), [(1, "failed"), (2, "forming")])
def test_what_cannot_run_at_all_is_not_tried_again_unless_it_ran_elsewhere(
    generation: int, state: str
) -> None:
    drive = Drive()
    job = drive.submit(retries=100)
    drive.run(job)
    causes = ["worker_killed"] * (generation - 1) + ["configuration"]
    for cause in causes:
        if job.state == "forming":
            drive.run(job)
        drive.tell(
            WorkerExited(
                job=job.id,
                generation=job.generation,
                node=job.placement.nodes[0],
                rank=3,
                cause=cause,
                detail="cannot start x: No such file or directory",
            )
        )
        drive.wait(SECOND)
    assert job.state == state
    assert (job.why.code == "cannot_run") == (state == "failed")


def test_jobs_that_ended_long_ago_are_only_remembered_in_their_teams_sums():
    drive = Drive(policy=Policy(ended_jobs=2))
    jobs = []
    for _ in range(4):
        jobs.append(drive.running(steps=10, team="red"))
        drive.tell(JobFinished(job=jobs[-1].id, generation=1, step=10))
    core = drive.core
    assert list(core.view.jobs) == list(core.ledger.accounts) == [jobs[2].id, jobs[3].id]
    core.ledger.check(core.view)
    whole = report(core.ledger, core.view.policy.price)
    assert whole.teams["red"].buckets["productive"] == 4 * 10 * EXPECTED.step_ns * 16
    (command,) = drive.tell(Cancel(job=jobs[0].id))
    assert isinstance(command.body, Refuse)


def test_the_next_of_an_array_still_waits_for_what_the_array_waits_for():
    drive = Drive()
    first = drive.running()
    spec = JobSpec(
        name="many",
        gang=ONE,
        expected=EXPECTED,
        array=Array(count=3, width=1),
        after=(Dependency(kind="afterany", job=first.id),),
    )
    drive.tell(Submit(spec=spec))
    members = [job for job in drive.core.view.jobs.values() if job.spec.name == "many"]
    drive.tell(Cancel(job=members[0].id))
    drive.wait(SECOND)
    assert [job.state for job in members] == ["cancelled", "pending", "pending"]
    finish(drive, first)
    drive.wait(SECOND)
    assert [job.state for job in members] == ["cancelled", "forming", "pending"]


def test_a_gang_that_drains_late_keeps_its_steps_where_nobody_waits_for_its_nodes():
    drive = Drive()
    job = drive.running()
    drive.tell(Requeue(job=job.id))
    drive.wait(25 * SECOND)  # storage was away; the checkpoint comes after the first deadline
    drive.tell(GangDrained(job=job.id, generation=job.generation, step=job.step, durable=True))
    drive.wait(SECOND)
    assert job.durable == job.step == 150
    assert not [note for note in drive.bodies(Notify) if note.reason.code == "given_up"]


def test_a_job_that_is_drained_in_its_first_step_has_as_long_as_that_may_take():
    drive = Drive()
    job = drive.submit()
    drive.run(job)
    drive.tell(Requeue(job=job.id, hold=True))
    assert job.state == "draining"
    limit_ns = job.gang.deadline_ns - drive.now_ns
    assert limit_ns >= drive.core.view.policy.timeouts.least_hang_ns
    drive.wait(limit_ns + 10 * SECOND)
    assert job.state == "pending" and job.held
    assert any("before a checkpoint was made" in str(n.reason) for n in drive.bodies(Notify))


def test_a_program_that_leaves_as_it_was_asked_to_is_told_to_begin_anew():
    drive = Drive()
    job = drive.submit()
    drive.run(job)
    drive.tell(Requeue(job=job.id, hold=True))
    drive.tell(GangDrained(job=job.id, generation=1, step=0, durable=False), SECOND)
    assert job.state == "pending"
    said = [str(notice.reason) for notice in drive.bodies(Notify)]
    assert any("it begins anew, unless it keeps its own" in text for text in said)
    assert not any("broke" in text for text in said)


def test_a_program_that_ended_is_done_whatever_steps_it_told_of():
    drive = Drive()
    job = drive.submit(reports_steps=False)
    drive.run(job)
    drive.train(job, 10)
    assert job.committed == 10
    drive.tell(JobFinished(job=job.id, generation=1, step=0))
    assert job.state == "done"


def test_a_job_whose_archive_lacks_a_checkpoint_is_done_and_says_so() -> None:
    drive = Drive()
    job = drive.running()
    missing = "steps 9: 403"
    drive.tell(JobFinished(job=job.id, generation=1, step=job.step, not_archived=missing))
    assert job.state == "done" and "not all is in the archive: steps 9: 403" in str(job.why)
    assert any("archive" in str(n.reason) for n in drive.bodies(Notify) if n.level == "warning")
