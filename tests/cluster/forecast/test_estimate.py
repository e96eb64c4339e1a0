"""Every pending job has an estimated start, or a sentence that says why nobody can tell."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from phalanx.cluster.core import Core
from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.forecast.why import explain, explainer
from phalanx.cluster.job_relations import Array, Dependency
from phalanx.cluster.jobs.horizon import length_ns
from phalanx.cluster.jobs.job import ClusterJob, Expected, GangShape, JobSpec
from phalanx.cluster.node import Node
from phalanx.cluster.policy import Partition, Policy, Qos, QueuePolicy, Quota
from phalanx.cluster.protocol.events import (
    Cancel,
    GangJoined,
    GangReady,
    Hold,
    JobFinished,
    NodeJoined,
    NodeSilent,
    Progress,
    QuarantineNode,
    Scale,
    SetQuota,
    SetReservation,
    Submit,
)
from phalanx.cluster.protocol.messages import Inventory
from phalanx.cluster.queue.decisions import Pending
from phalanx.cluster.reasons import about
from tests.cluster.drive import SECOND, Drive
from tests.cluster.site import Site, policy_of
from tests.cluster.test_queue_properties import SIZES
from tests.examples import examples

HOUR = 3600 * SECOND
NODE = GangShape(replicas=1, tensor=8, slot_gpus=8, slot_cpus=8)
NOBODY_CODES = (
    "held_open",
    "dependency_never",
    "dependency_stuck",
    "dependency_open",
    "saved_open",
    "array_open",
    "never_as_is",
    "nodes_away",
    "no_end",
)


def nodes(count: int) -> GangShape:
    return structs.replace(NODE, replicas=count)


def why(drive: Drive, job: ClusterJob | int) -> Pending:
    number = job if isinstance(job, int) else job.id
    return explain(drive.core.queue, drive.core.view, number)


def ends(drive: Drive, job: ClusterJob) -> int:
    """When a running job will be gone at the latest."""
    return job.started_ns + length_ns(drive.core.view, job)


def finish(drive: Drive, job: ClusterJob) -> None:
    if job.state == "forming":
        drive.run(job)
    drive.tell(JobFinished(job=job.id, generation=job.generation, step=job.step), SECOND)


def tidy(drive: Drive) -> None:
    """What must hold of every answer, in any state."""
    core = drive.core
    before, answers = core.snapshot(), explainer(core.queue, core.view)
    restored = Core.restore(before)
    pending = [job for job in core.view.jobs.values() if job.state == "pending"]
    for job in pending:
        found = why(drive, job)
        told = str(found.reason)
        assert told and "{" not in told and told != found.reason.code.replace("_", " ")
        assert set(found.priority) >= {"job", "age", "fair_share"}
        if found.estimated_start_ns is None:
            assert found.unknown, told
        else:
            assert not found.unknown
            assert found.estimated_start_ns >= core.view.now_ns
            assert found.reason.code not in NOBODY_CODES
        assert answers.of(job.id) == found == why(drive, job)
        assert explain(restored.queue, restored.view, job.id) == found
    assert core.snapshot() == before


LIMITS = {
    "team": ({}, Quota(gpus=0, ceiling=16), {"team": "a"}, "at_ceiling"),
    "class": (
        {"normal": Qos(), "cheap": Qos(most_gpus=16)},
        None,
        {"qos": "cheap"},
        "at_qos_limit",
    ),
}


@pytest.mark.parametrize("kind", LIMITS)
def test_under_a_limit_it_is_when_enough_was_given_back(kind: str) -> None:
    qos, quota, spec, code = LIMITS[kind]
    queue = QueuePolicy(qos=qos or {"normal": Qos()}, quotas={"a": quota} if quota else {})
    drive = Drive(8, Policy(queue=queue))
    first = drive.submit(gang=NODE, time_limit_ns=2 * HOUR, **spec)
    second = drive.submit(gang=NODE, time_limit_ns=4 * HOUR, **spec)
    waits = [drive.submit(gang=NODE, time_limit_ns=HOUR, **spec) for _ in range(2)]
    large = drive.submit(gang=nodes(2), time_limit_ns=HOUR, **spec)
    found = [why(drive, job) for job in (*waits, large)]
    assert {one.reason.code for one in found} == {code}
    starts = [one.estimated_start_ns for one in found]
    assert starts[0] == ends(drive, first)
    # The second has an hour's work before it, which is done long before the other running job.
    assert ends(drive, first) < starts[1] <= ends(drive, second)
    assert starts[2] >= ends(drive, second)
    tidy(drive)


def test_a_limit_that_frees_before_the_fleet_does_is_not_what_is_waited_for_longest() -> None:
    drive = Drive(2, Policy(queue=QueuePolicy(quotas={"a": Quota(gpus=0, ceiling=8)})))
    drive.submit(gang=NODE, team="a", time_limit_ns=HOUR)
    other = drive.submit(gang=NODE, team="b", time_limit_ns=10 * HOUR)
    drive.submit(gang=nodes(2), team="b", time_limit_ns=5 * HOUR)  # it is promised both nodes
    waits = drive.submit(gang=NODE, team="a", time_limit_ns=12 * HOUR)
    found = why(drive, waits)
    assert found.reason.code == "at_ceiling"
    assert found.estimated_start_ns >= ends(drive, other)
    tidy(drive)


def test_what_is_saved_for_another_job_is_there_when_that_one_has_started() -> None:
    policy = policy_of(starving_ns=2 * HOUR, quotas={"a": Quota(gpus=0, ceiling=16)})
    site = Site(policy=policy)
    site.submit(8, team="a", run=3 * HOUR, time_limit_ns=3 * HOUR)
    site.look()
    starves = site.submit(16, team="a", run=HOUR, time_limit_ns=HOUR)
    site.play(2 * HOUR)
    small = site.submit(8, team="a", run=HOUR, time_limit_ns=HOUR)
    site.look()
    found = explain(site.queue, site.view, small)
    assert found.reason.code == "saved_for"
    first = explain(site.queue, site.view, starves).estimated_start_ns
    assert first == 3 * HOUR and found.estimated_start_ns >= first
    site.play(20 * HOUR)
    assert site.started[small] == 4 * HOUR >= found.estimated_start_ns


def test_behind_a_job_whose_steps_are_known_it_is_their_end_on_the_same_nodes_too() -> None:
    drive = Drive(1)
    steps = Expected(step_ns=5 * SECOND, steps=100)
    runs = drive.submit(gang=NODE, expected=steps, time_limit_ns=10 * HOUR)
    drive.run(runs)
    asks = {"gang": NODE, "expected": steps, "time_limit_ns": 10 * HOUR}
    second = drive.submit(after=(Dependency("afterok", runs.id),), **asks)
    third = drive.submit(after=(Dependency("afterok", second.id),), **asks)
    starts = [why(drive, job).estimated_start_ns for job in (second, third)]
    assert starts[0] == runs.started_ns + 100 * steps.step_ns
    assert starts[1] == starts[0] + 100 * steps.step_ns + steps.start_ns + steps.form_ns
    tidy(drive)
    drive.submit(gang=NODE, time_limit_ns=HOUR)  # it comes first, when the limit is reached
    assert why(drive, second).estimated_start_ns >= ends(drive, runs)
    tidy(drive)


def test_what_is_saved_for_a_job_that_nobody_can_tell_of_says_so_of_each_that_waits() -> None:
    fleet = Fleet(Node(name=f"n{i}", gpus=8, domain=f"d{i // 2}") for i in range(6))
    queue = QueuePolicy(starving_ns=HOUR, quotas={"a": Quota(gpus=16, ceiling=16)})
    drive = Drive(policy=Policy(queue=queue), fleet=fleet)
    asks = {"team": "a", "time_limit_ns": 9 * HOUR}
    runs = drive.submit(gang=NODE, **asks)
    wide = drive.submit(gang=GangShape(replicas=1, tensor=16, slot_gpus=8), **asks)
    drive.run(runs)
    assert runs.placement is not None and runs.placement.nodes == (0,)
    for node in (1, 3, 5):  # nodes enough are left, and no two of one domain
        drive.tell(QuarantineNode(node=node))
    drive.wait(HOUR)
    small = drive.submit(gang=NODE, **asks)
    after = (Dependency("afterany", runs.id),)
    behind = [drive.submit(gang=NODE, after=after, **asks) for _ in range(2)]
    assert why(drive, wide).estimated_start_ns is None
    for job in (small, *behind):
        found = why(drive, job)
        assert found.estimated_start_ns is None and found.reason.code == "saved_open"
        assert str(found.reason) == (
            f"what team a may hold is saved for job {wide.id}, which has waited 1 h; nobody can say"
            f" when job {wide.id} starts"
        )
    tidy(drive)


def test_after_a_running_job_it_is_its_end() -> None:
    drive = Drive(4)
    first = drive.submit(gang=NODE, time_limit_ns=2 * HOUR)
    steps = Expected(steps=360, step_ns=10 * SECOND)
    second = drive.submit(gang=NODE, time_limit_ns=9 * HOUR, expected=steps)
    for other, end in ((first, ends(drive, first)), (second, second.started_ns + HOUR)):
        waits = drive.submit(gang=NODE, after=(Dependency("afterok", other.id),))
        found = why(drive, waits)
        assert found.reason.code == "dependency"
        # The second one has an hour of steps to make and will not need its nine.
        assert end <= found.estimated_start_ns <= end + 5 * SECOND
        assert found.priority["age"] == 0
    tidy(drive)


def test_a_chain_of_thousands_ends_when_all_of_it_has_run() -> None:
    drive = Drive(1)
    first = drive.submit(gang=NODE, time_limit_ns=HOUR)
    count, last = 3000, first.id
    for _ in range(count):
        after = (Dependency("afterok", last),)
        drive.tell(Submit(spec=JobSpec(name="j", gang=NODE, time_limit_ns=HOUR, after=after)))
        last = drive.core._ctx.next_job - 1
    each = length_ns(drive.core.view, drive.core.view.jobs[last])
    found = why(drive, last)
    assert found.estimated_start_ns == ends(drive, first) + (count - 1) * each


def test_namesakes_run_one_after_the_other() -> None:
    drive = Drive(4)
    spec = {"name": "n", "user": "ada", "gang": NODE, "after": (Dependency("singleton"),)}
    jobs = [drive.submit(**spec, time_limit_ns=hours * HOUR) for hours in (3, 1, 2, 1)]
    found = [why(drive, job).estimated_start_ns for job in jobs[1:]]
    assert found[0] == ends(drive, jobs[0])
    lengths = [length_ns(drive.core.view, job) for job in jobs]
    assert found[1:] == [found[0] + lengths[1], found[0] + lengths[1] + lengths[2]]
    tidy(drive)


def test_behind_many_it_is_the_last_of_them() -> None:
    drive = Drive(2)
    drive.submit(gang=nodes(2), time_limit_ns=HOUR)
    array = drive.submit(gang=NODE, time_limit_ns=HOUR, array=Array(6))
    long = drive.submit(gang=nodes(2), time_limit_ns=30 * HOUR, priority=-1000)
    after = tuple(Dependency("afterany", number) for number in (array.id, long.id))
    waits = drive.submit(gang=NODE, after=after)
    assert len(waits.waiting_for) == 7
    members = [why(drive, array.id + index).estimated_start_ns for index in range(6)]
    last = why(drive, long).estimated_start_ns + length_ns(drive.core.view, long)
    assert last > max(members) + HOUR
    assert why(drive, waits).estimated_start_ns == last
    tidy(drive)


def test_a_member_of_an_array_is_let_in_when_one_before_it_ends() -> None:
    drive = Drive(8)
    first = drive.submit(gang=NODE, time_limit_ns=2 * HOUR, array=Array(7, 2))
    for index in (0, 1):
        drive.run(drive.core.view.jobs[first.id + index])
    drive.train(first, 720)
    finish(drive, first)
    drive.wait(SECOND)  # member 2 runs in its place, an hour later than member 1
    view = drive.core.view
    running = [view.jobs[first.id + index] for index in (1, 2)]
    each = length_ns(view, view.jobs[first.id + 3])
    found = [why(drive, first.id + index) for index in (3, 4, 5, 6)]
    assert [one.reason.facts["ahead"] for one in found] == [0, 1, 2, 3]
    assert {one.reason.code for one in found} == {"array_turn"}
    starts = [ends(drive, job) for job in running]
    assert [one.estimated_start_ns for one in found] == [*starts, *(at + each for at in starts)]
    tidy(drive)


def test_a_member_that_a_person_holds_keeps_its_turn_for_ever() -> None:
    drive = Drive(8)
    first = drive.submit(gang=NODE, time_limit_ns=HOUR, array=Array(4, 1))
    drive.tell(Hold(job=first.id + 1))
    assert why(drive, first.id + 1).reason.code == "held_open"
    told = why(drive, first.id + 2)
    assert told.estimated_start_ns is None
    assert told.reason.code == "array_open" and f"holds job {first.id + 1}" in str(told.reason)
    tidy(drive)
    drive.tell(Hold(job=first.id + 1, held=False))
    assert why(drive, first.id + 2).estimated_start_ns is not None


def test_of_a_held_job_nobody_can_say_when_but_what_if_it_is_released() -> None:
    drive = Drive(1)
    runs = drive.submit(gang=NODE, time_limit_ns=2 * HOUR)
    held = drive.submit(gang=NODE, time_limit_ns=HOUR)
    drive.tell(Hold(job=held.id))
    after = (Dependency("afterany", held.id),)
    behind = drive.submit(gang=NODE, after=after, time_limit_ns=HOUR)
    last = drive.submit(gang=NODE, after=(Dependency("afterok", behind.id),))
    found = why(drive, held)
    assert found.estimated_start_ns is None and sum(found.priority.values())
    assert str(found.reason) == (
        "held by a person: nobody can say when it starts until it is released (released now, it"
        " would start in 1 to 3 h)"
    )
    for job in (behind, last):
        told = why(drive, job)
        assert told.estimated_start_ns is None
        assert str(told.reason).endswith(f"nobody can say until when: a person holds job {held.id}")
    tidy(drive)
    drive.tell(Hold(job=held.id, held=False))
    drive.wait(SECOND)
    assert why(drive, held).estimated_start_ns == ends(drive, runs)
    assert why(drive, last).estimated_start_ns > why(drive, behind).estimated_start_ns


def test_what_can_never_be_satisfied_says_so_and_has_no_estimate() -> None:
    drive = Drive(2)
    first = drive.submit(gang=NODE)
    needs = drive.submit(gang=NODE, after=(Dependency("afterok", first.id),))
    waits = drive.submit(gang=NODE, after=(Dependency("afterany", needs.id),))
    drive.tell(Cancel(job=first.id))
    assert (found := why(drive, needs)).estimated_start_ns is None
    assert "can never start" in str(found.reason)
    told = why(drive, waits)
    assert told.estimated_start_ns is None and told.reason.code == "dependency_stuck"
    tidy(drive)


def test_a_limit_below_what_a_job_needs_is_told_until_it_is_raised_again() -> None:
    drive = Drive(4)
    drive.submit(gang=nodes(4), time_limit_ns=HOUR)
    waits = drive.submit(gang=nodes(2), team="a", time_limit_ns=HOUR)
    behind = drive.submit(gang=NODE, after=(Dependency("afterok", waits.id),))
    before = why(drive, waits)
    drive.tell(SetQuota(team="a", gpus=0, ceiling=8))
    found = why(drive, waits)
    assert found.estimated_start_ns is None and waits.state == "pending"
    assert str(found.reason) == (
        "can never start as things are: it needs 16 GPUs and the ceiling of team a allows 8; raise"
        " that limit, or cancel it and submit it smaller"
    )
    assert str(why(drive, behind).reason).endswith(f"job {waits.id} can never start")
    tidy(drive)
    drive.tell(SetQuota(team="a", gpus=0, ceiling=16))
    assert why(drive, waits).estimated_start_ns == before.estimated_start_ns


def test_a_held_job_that_could_not_start_anyway_is_not_told_to_wait_for_a_release() -> None:
    drive = Drive(4)
    drive.submit(gang=nodes(4), time_limit_ns=HOUR)
    waits = drive.submit(gang=nodes(2), team="a", time_limit_ns=HOUR)
    behind = drive.submit(gang=NODE, after=(Dependency("afterok", waits.id),))
    drive.tell(Hold(job=waits.id))
    assert str(why(drive, behind).reason).endswith(f"a person holds job {waits.id}")
    drive.tell(SetQuota(team="a", gpus=0, ceiling=8))
    assert str(why(drive, behind).reason).endswith(f"job {waits.id} can never start")
    tidy(drive)


def test_an_elastic_job_is_told_of_the_least_that_it_starts_with() -> None:
    drive = Drive(2)
    drive.run(drive.submit(gang=nodes(2), time_limit_ns=HOUR))
    shape = structs.replace(NODE, least_replicas=1, most_replicas=8)
    waits = drive.submit(gang=shape)
    drive.tell(Scale(job=waits.id, replicas=8))
    assert str(why(drive, waits).reason).startswith("it needs a node with 8 free GPUs, and none")
    tidy(drive)


RULES = [
    ({"qos": {"normal": Qos(most_gpus=8)}}, "class of service normal allows 8; raise"),
    ({"partitions": {"p": Partition(most_time_ns=HOUR)}}, "partition p allows 3600 s; raise"),
    ({"partitions": {"p": Partition(teams=("b",))}}, "partition p is for b, not for team a; let"),
]


@pytest.mark.parametrize(("rules", "told"), RULES)
def test_rules_that_a_job_no_longer_meets_are_told_and_keep_it_waiting(
    rules: dict[str, object], told: str
) -> None:
    fleet = Fleet(Node(name=f"n{i}", partition="p") for i in range(2))
    drive = Drive(fleet=fleet)
    first = drive.submit(gang=nodes(2), team="a", partition="p", time_limit_ns=2 * HOUR)
    waits = drive.submit(gang=nodes(2), team="a", partition="p", time_limit_ns=2 * HOUR)
    assert why(drive, waits).estimated_start_ns is not None
    core = Core.restore(drive.core.snapshot())  # the site starts with other rules
    core.view.policy = Policy(queue=QueuePolicy(**rules))
    drive.core = core
    found = why(drive, waits.id)
    assert found.reason.code == "never_as_is" and told in str(found.reason)
    finish(drive, core.view.jobs[first.id])
    drive.wait(HOUR)
    assert core.view.jobs[waits.id].state == "pending"


def comes_back(drive: Drive, number: int, **fields: object) -> None:
    """A node leaves, and is another machine when it comes back."""
    drive.tell(NodeSilent(node=number))
    new = structs.replace(drive.core.view.fleet.nodes[number], **fields)
    drive.tell(NodeJoined(node=new, inventory=Inventory(2)))
    drive.wait(SECOND)


@pytest.mark.parametrize(
    ("spec", "fields", "told"),
    [
        ({"partition": "p"}, {"partition": "q"}, 'no node is in partition "p"'),
        ({"constraint": "fast"}, {"features": ()}, "no node has the features it asks for"),
        ({"constraint": "fast"}, {"gpus": 4}, "no node of the fleet has what it asks for"),
    ],
)
def test_a_fleet_that_lost_what_a_job_needs_is_told(
    spec: dict[str, str], fields: dict[str, object], told: str
) -> None:
    usual = [Node(name=f"n{i}") for i in range(2)]
    drive = Drive(fleet=Fleet([Node(name="s", partition="p", features=("fast",)), *usual]))
    first = drive.submit(gang=NODE, **spec)
    waits = drive.submit(gang=NODE, **spec)
    drive.tell(Cancel(job=first.id))
    drive.tell(Hold(job=waits.id))
    comes_back(drive, 0, **fields)
    for held in (True, False):
        drive.tell(Hold(job=waits.id, held=held))
        drive.wait(SECOND)
        found = why(drive, waits)
        assert found.reason.code == "never_as_is" and told in str(found.reason)
        assert "such nodes must join" in str(found.reason) or "join that" in str(found.reason)
    tidy(drive)


def test_nodes_that_are_away_come_back_when_nobody_can_say() -> None:
    drive = Drive(2)
    job = drive.submit(gang=NODE, time_limit_ns=HOUR)
    waits = drive.submit(gang=nodes(2), time_limit_ns=HOUR)
    assert why(drive, waits).estimated_start_ns == ends(drive, job)
    drive.tell(NodeSilent(node=1 - job.placement.nodes[0]))
    drive.wait(SECOND)
    found = why(drive, waits)
    assert found.estimated_start_ns is None and found.reason.code == "nodes_away"
    assert "1 of 2 are in service" in str(found.reason)
    tidy(drive)


def test_jobs_that_a_limit_holds_back_are_in_nobody_elses_way() -> None:
    drive = Drive(4, Policy(queue=QueuePolicy(quotas={"a": Quota(gpus=0, ceiling=8)})))
    drive.submit(gang=NODE, team="a", time_limit_ns=4 * HOUR)
    runs = drive.submit(gang=nodes(3), team="b", time_limit_ns=2 * HOUR)
    for _ in range(50):
        drive.submit(gang=NODE, team="a", time_limit_ns=10 * HOUR, priority=5000)
    drive.submit(gang=NODE, team="c", time_limit_ns=HOUR)  # it is promised a node
    other = drive.submit(gang=NODE, team="c", time_limit_ns=HOUR)
    found = why(drive, other)
    assert found.reason.facts["ahead"] == 51
    assert found.estimated_start_ns == ends(drive, runs)


def test_who_wants_other_nodes_is_in_nobodys_way() -> None:
    kinds = ["a100"] * 2 + ["h100"] * 2
    drive = Drive(fleet=Fleet(Node(name=f"n{i}", kind=kind) for i, kind in enumerate(kinds)))
    drive.submit(gang=nodes(2), constraint="a100", time_limit_ns=20 * HOUR)
    runs = drive.submit(gang=nodes(2), constraint="h100", time_limit_ns=2 * HOUR)
    for _ in range(20):
        drive.submit(gang=NODE, constraint="a100", time_limit_ns=10 * HOUR, priority=100)
    waits = drive.submit(gang=NODE, constraint="h100", time_limit_ns=HOUR)
    assert why(drive, waits).estimated_start_ns == ends(drive, runs)
    tidy(drive)


@examples(25)
@given(st.integers(0, 2**32))
def test_many_answers_of_a_moment_are_those_that_each_job_gets_alone(seed: int) -> None:
    rng = random.Random(seed)
    quotas = {"a": Quota(gpus=16, ceiling=24), "b": Quota(gpus=8)}
    qos = {"normal": Qos(), "cheap": Qos(most_gpus=16)}
    site = Site(policy=policy_of(quotas=quotas, qos=qos, starving_ns=5 * HOUR))
    for hour in range(6):
        for _ in range(8):
            limit = rng.choice([0, 1, 2, 5]) * HOUR
            team, kind = rng.choice("abc"), rng.choice(["normal", "cheap"])
            gpus = rng.choice(SIZES[:-2])
            site.submit(gpus, run=HOUR, team=team, qos=kind, time_limit_ns=limit)
        site.play(hour * HOUR)
    answers = explainer(site.queue, site.view)
    for number in site.view.pending:
        assert answers.of(number) == explain(site.queue, site.view, number)


RULES_OF_ANY_SITE = Policy(
    queue=QueuePolicy(
        quotas={"a": Quota(gpus=8, ceiling=24), "b": Quota(gpus=8)},
        qos={"normal": Qos(), "cheap": Qos(most_gpus=16)},
        starving_ns=5 * HOUR,
    )
)


def any_spec(rng: random.Random, known: int) -> JobSpec:
    after = []
    if known and rng.random() < 0.4:
        kinds = ("afterok", "afterany", "singleton")
        after = [Dependency(rng.choice(kinds), rng.randint(1, known)) for _ in range(2)]
    width = rng.choice([8, 4])
    return JobSpec(
        name=rng.choice("xyz"),
        team=rng.choice("abc"),
        qos=rng.choice(["normal", "normal", "cheap"]),
        gang=GangShape(
            replicas=rng.choice([1, 1, 2, 3]),
            least_replicas=rng.choice([0, 0, 1]),
            tensor=width,
            slot_gpus=width,
        ),
        expected=Expected(steps=rng.choice([0, 400]), checkpoint_steps=100),
        spares=rng.choice([0, 0, 1]),
        time_limit_ns=rng.choice([0, 1, 5]) * HOUR,
        requeue_at_limit=rng.random() < 0.3,
        constraint=rng.choice(["", "", "h100"]),
        array=Array(rng.randint(1, 5), rng.randint(0, 2)) if rng.random() < 0.3 else None,
        after=tuple(after),
    )


def anything(rng: random.Random, drive: Drive) -> None:
    """One order, event or stretch of time."""
    jobs = drive.core.view.jobs
    number = rng.randint(1, max(1, len(jobs)))
    active = list(drive.core.view.active)
    choice = rng.random()
    if choice < 0.5 or not jobs:
        drive.tell(Submit(spec=any_spec(rng, len(jobs))))
    elif choice < 0.6:
        drive.tell(Hold(job=number, held=rng.random() < 0.7))
    elif choice < 0.65:
        drive.tell(Cancel(job=number))
    elif choice < 0.8 and active:
        job = jobs[rng.choice(active)]
        told = {"job": job.id, "generation": job.generation}
        drive.tell(GangJoined(**told, step=-1), SECOND)
        drive.tell(GangReady(**told, step=0), SECOND)
        if rng.random() < 0.5:
            drive.tell(JobFinished(**told, step=10), SECOND)
    elif choice < 0.85:
        drive.tell(NodeSilent(node=rng.randrange(6)))
    elif choice < 0.9:
        drive.tell(SetQuota(team=rng.choice("ac"), gpus=0, ceiling=rng.choice([0, 8, 16])))
    elif choice < 0.92:
        opens = drive.now_ns + HOUR
        window = SetReservation(name="w", start_ns=opens, end_ns=opens + HOUR, nodes=(0, 1))
        drive.tell(window)
    drive.wait(rng.choice([0, SECOND, 20 * SECOND]))


@examples(60)
@given(st.integers(0, 2**32))
def test_whatever_happened_every_pending_job_has_its_reason_and_an_estimate_or_why_not(
    seed: int,
) -> None:
    rng = random.Random(seed)
    fleet = Fleet(Node(name=f"n{i}", kind="h100" if i % 2 else "a100") for i in range(6))
    drive = Drive(policy=RULES_OF_ANY_SITE, fleet=fleet)
    for _ in range(30):
        anything(rng, drive)
    tidy(drive)


def test_members_that_can_never_start_go_on_saying_so_when_one_of_them_leaves() -> None:
    drive = Drive(4)
    first, other = drive.submit(gang=NODE), drive.submit(gang=NODE)
    after = (Dependency("afterok", first.id), Dependency("afterany", other.id))
    array = drive.submit(gang=NODE, array=Array(3, 1), after=after)
    drive.tell(Cancel(job=first.id))
    drive.tell(Cancel(job=array.id))
    for index in (1, 2):
        assert why(drive, array.id + index).reason.code == "dependency_never"
    tidy(drive)


def test_what_is_collected_for_a_job_that_waited_and_waited_is_told_to_the_others() -> None:
    drive = Drive(4, Policy(queue=QueuePolicy(starving_ns=HOUR)))
    ended = drive.running(1, gang=NODE, time_limit_ns=200 * HOUR)
    for hours in (100, 100, 300):
        drive.running(1, gang=NODE, time_limit_ns=hours * HOUR)
    late = drive.submit(gang=nodes(2), time_limit_ns=HOUR)  # promised the nodes of the 100 hours
    drive.wait(3 * HOUR)
    finish(drive, ended)
    drive.wait(SECOND)
    short = drive.submit(gang=NODE, time_limit_ns=HOUR, priority=100)
    found = why(drive, short)
    assert short.state == "pending" and found.reason.code == "collected_for"
    assert f"collected for job {late.id}, which has waited 3 h" in str(found.reason)
    assert found.estimated_start_ns >= why(drive, late).estimated_start_ns > drive.now_ns
    tidy(drive)


def test_members_of_a_singleton_array_are_told_that_they_run_one_by_one() -> None:
    drive = Drive(4)
    after = (Dependency("singleton"),)
    first = drive.submit(gang=NODE, time_limit_ns=HOUR, array=Array(3), after=after)
    found = [why(drive, first.id + index) for index in (1, 2)]
    assert [one.reason.facts["width"] for one in found] == [1, 1]
    each = length_ns(drive.core.view, first)
    assert [one.estimated_start_ns for one in found] == [
        ends(drive, first),
        ends(drive, first) + each,
    ]


def test_an_estimate_follows_the_steps_that_are_left() -> None:
    """What was expected of a job that is slower is not repeated for as long as it runs."""
    drive = Drive(1)
    runs = drive.submit(gang=NODE, expected=Expected(steps=100, step_ns=SECOND))
    drive.run(runs)
    waits = drive.submit(gang=NODE, time_limit_ns=HOUR)
    told = []
    for step in range(10, 100, 10):
        drive.wait(60 * SECOND)  # ten steps a minute, not sixty
        now = drive.now_ns
        made = {"step": step, "committed": step, "durable": 0, "at_ns": now}
        drive.tell(Progress(job=runs.id, generation=runs.generation, **made))
        found = why(drive, waits)
        assert found.estimated_start_ns is not None
        left_ns = found.estimated_start_ns - drive.core.view.now_ns
        assert abs(left_ns - (100 - step) * 6 * SECOND) <= 60 * SECOND
        told.append(left_ns)
    assert told == sorted(told, reverse=True) and len(set(told)) == len(told)


@pytest.mark.parametrize("expected", [Expected(), Expected(steps=100, step_ns=SECOND)])
def test_behind_a_job_that_nobody_can_tell_of_the_start_is_unknown_and_says_why(
    expected: Expected,
) -> None:
    drive = Drive(1)
    runs = drive.submit(gang=NODE, expected=expected)
    drive.run(runs)
    waits = drive.submit(gang=NODE, time_limit_ns=HOUR)
    behind = drive.submit(gang=NODE, time_limit_ns=HOUR)
    drive.wait(HOUR)  # without a step that was measured
    late = "should have ended by now" if expected.steps else "neither a time limit nor a number"
    for job in (waits, behind):
        found = why(drive, job)
        assert found.estimated_start_ns is None
        assert f"job {runs.id}, which holds what it needs" in found.unknown
        assert late in found.unknown
        assert found.reason.code == "waits_for_room"
    tidy(drive)


def test_behind_waiting_jobs_without_a_length_the_start_is_unknown() -> None:
    drive = Drive(1, Policy(queue=QueuePolicy(short_weight=0)))
    drive.run(drive.submit(gang=NODE, time_limit_ns=HOUR))
    endless = drive.submit(gang=NODE)
    waits = drive.submit(gang=NODE, time_limit_ns=HOUR, priority=-100)
    assert why(drive, endless).estimated_start_ns is not None
    found = why(drive, waits)
    assert found.estimated_start_ns is None and f"job {endless.id}" in found.unknown


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0, "less than a minute"),
        (40, "less than a minute"),
        (60, "1 to 2 min"),
        (500, "5 to 15 min"),
        (3600, "45 min to 2 h"),
        (7260, "1 to 3 h"),
        (86_400, "18 h to 2 d"),
        (61 * 86_400, "45 to 90 d"),
        (10**9, "more than a year"),
    ],
)
def test_an_estimated_time_is_told_as_a_rounded_range(seconds: int, told: str) -> None:
    assert about(seconds * SECOND) == told
