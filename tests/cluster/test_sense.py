"""Events that cannot be true are refused with the reason, and never break the core."""

from __future__ import annotations

import random
from typing import Any, get_args, get_type_hints

import pytest
from msgspec import Struct

from phalanx.cluster.core import Core
from phalanx.cluster.forecast.why import explain
from phalanx.cluster.jobs.job import Expected, GangShape, JobSpec, SpecChange
from phalanx.cluster.node import Node, bad_node
from phalanx.cluster.policy import Policy
from phalanx.cluster.protocol.commands import Notify, Refuse
from phalanx.cluster.protocol.events import (
    Corruption,
    DataStarved,
    EventBody,
    GangReady,
    JobFinished,
    NodeJoined,
    NoProgress,
    Progress,
    SetQuota,
    SetReservation,
    SlowRank,
    Submit,
    SubmitWorkflow,
    ThroughputRegression,
)
from phalanx.cluster.protocol.messages import DeviceError, Holding, Inventory
from tests.cluster.drive import EXPECTED, SECOND, SHAPE, Drive
from tests.cluster.invariants import check

NO_TEXT = "\ud800"  # half of a character: JSON can carry it, and nothing can write it down
NUMBERS = [0, 1, -1, 2, 5, 99, 10**30, -(10**30), 1 << 63, 1 << 62, 7]
TEXTS = ["", "x", NO_TEXT, "a" * 5000, "thermal", "xid", "user_error"]


def progress(**fields: int) -> Progress:
    usual = {"job": 1, "generation": 1, "step": 200, "committed": 200, "durable": 100}
    return Progress(**{**usual, "at_ns": 0, **fields})


@pytest.mark.parametrize(
    ("kind", "fields", "told"),
    [
        (SlowRank, {"node": 0, "rank": 0, "part": "compute", "slowdown_ppm": -1_000_000}, "1 to"),
        (DataStarved, {"share_ppm": -3}, "share_ppm = -3: must be 0 to 1000000"),
        (DataStarved, {"share_ppm": 2_000_000}, "must be 0 to 1000000"),
        (ThroughputRegression, {"step": 3, "slowdown_ppm": 0}, "slowdown_ppm = 0"),
        (NoProgress, {"step": -4}, "step = -4"),
        (JobFinished, {"step": 3}, "step = 3: job 1 has committed step 150"),
    ],
)
def test_findings_that_cannot_be_are_told_and_change_nothing(
    kind: type[EventBody], fields: dict[str, Any], told: str
) -> None:
    drive = Drive()
    job = drive.running()
    commands = drive.tell(kind(job=job.id, generation=job.generation, **fields))
    assert [type(command.body) for command in commands] == [Notify]
    assert told in str(commands[0].body.reason)
    assert job.state == "running"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"step": 5, "committed": 99}, "committed = 99: must not be above its step 5"),
        ({"step": 10**30}, "step = 1000"),
        ({"step": -1, "committed": -1}, "step = -1: must be 0 to"),
        ({"durable": -7}, "durable = -7"),
        ({"at_ns": 1 << 70}, "at_ns"),
        ({"busy_ns": -1}, "busy_ns = -1"),
        ({"data_wait_ns": 10**30}, "data_wait_ns"),
    ],
)
def test_progress_that_cannot_be_is_told_and_changes_nothing(
    fields: dict[str, int], told: str
) -> None:
    drive = Drive()
    job = drive.running()
    before = (job.step, job.committed, job.durable)
    (command,) = drive.tell(progress(**fields))
    assert isinstance(command.body, Notify) and command.body.level == "warning"
    assert str(command.body.reason).startswith("Progress.") and told in str(command.body.reason)
    assert (job.step, job.committed, job.durable) == before and job.state == "running"
    drive.train(job, 10)
    assert job.step == before[0] + 10


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"name": NO_TEXT}, r"spec.name = '\ud800': is not Unicode text"),
        ({"payload": f"x{NO_TEXT}"}, "spec.payload"),
        ({"priority": 10**30}, "spec.priority"),
        ({"gang": GangShape(replicas=10**30)}, "spec.gang.replicas"),
        (
            {"expected": Expected(step_ns=SECOND, exposed_ns=2 * SECOND)},
            "expected.exposed_ns = 2000000000: is part of a step, which takes 1000000000 ns",
        ),
        ({"expected": Expected(step_ns=SECOND, bubble_ns=2 * SECOND)}, "expected.bubble_ns"),
        (
            {"expected": Expected(step_ns=10, exposed_ns=6, bubble_ns=6)},
            "together with the bubble 12 ns, more than a step of 10 ns",
        ),
    ],
)
def test_a_submission_that_cannot_be_is_refused(spec: dict[str, Any], told: str) -> None:
    drive = Drive()
    full = JobSpec(**{"name": "job", "gang": SHAPE, "expected": EXPECTED, **spec})
    (command,) = drive.tell(Submit(spec=full, request="ask"))
    assert isinstance(command.body, Refuse) and command.body.request == "ask"
    assert told in str(command.body.reason)
    assert not drive.core.view.jobs
    Core.restore(drive.core.snapshot())


@pytest.mark.parametrize(
    ("order", "told"),
    [
        (SubmitWorkflow(steps=(), request="ask"), "a workflow needs at least one job"),
        (
            SetReservation(name="w", start_ns=20, end_ns=10, gpus=8, request="ask"),
            "end_ns = 10: must be after start_ns = 20 (0 removes the reservation)",
        ),
        (SetReservation(name="w", start_ns=9, end_ns=9, gpus=8, request="ask"), "must be after"),
        (SetQuota(team=NO_TEXT, gpus=8, request="ask"), "SetQuota.team"),
        (SetQuota(team="a", gpus=1 << 80, request="ask"), "SetQuota.gpus"),
    ],
)
def test_an_order_that_cannot_be_is_answered_with_the_reason(order: EventBody, told: str) -> None:
    drive = Drive()
    (command,) = drive.tell(order)
    assert isinstance(command.body, Refuse) and command.body.request == "ask"
    assert told in str(command.body.reason)


def test_a_request_that_cannot_be_written_is_not_said_again() -> None:
    drive = Drive()
    (command,) = drive.tell(SetQuota(team="a", gpus=8, request=NO_TEXT))
    assert isinstance(command.body, Refuse) and command.body.request == ""


def test_a_rail_that_no_node_has_is_no_error() -> None:
    drive = Drive()
    job = drive.running()
    (command,) = drive.tell(DeviceError(node=0, cause="nic", rail=1 << 40))
    assert isinstance(command.body, Notify) and "rail" in str(command.body.reason)
    assert job.state == "running"


def test_facts_with_a_number_out_of_bounds_are_told() -> None:
    drive = Drive()
    job = drive.submit()
    (command,) = drive.tell(GangReady(job=job.id, generation=1, step=1 << 63))
    assert isinstance(command.body, Notify) and "GangReady.step" in str(command.body.reason)


@pytest.mark.parametrize("word", ["a|b", "x y", "", "a&b", "!a", "(", NO_TEXT])
def test_a_feature_that_no_constraint_can_name_is_refused(word: str) -> None:
    drive = Drive(1)
    drive.tell(NodeJoined(node=Node(name="new", features=(word,)), inventory=Inventory()))
    (notice,) = drive.bodies(Notify)
    assert notice.level == "warning" and len(drive.core.view.fleet) == 1
    if word != NO_TEXT:
        assert "cannot be named in a constraint" in str(notice.reason)


def test_a_kind_that_no_constraint_can_name_is_refused() -> None:
    wrong = bad_node(Node(name="n", kind="H100 80GB"))
    assert wrong is not None and 'kind = "H100 80GB"' in str(wrong)
    assert bad_node(Node(name="n", kind="h100-sxm5.80:x+y")) is None


def test_fingerprints_have_all_their_bits() -> None:
    drive = Drive()
    job = drive.running()
    told = []
    for wide in (1 << 64, -(1 << 64), -1, (1 << 64) - 1):
        claims = ((0, wide), (1, 5))
        fact = Corruption(job=job.id, generation=1, step=150, clean_step=149, claims=claims)
        commands = drive.tell(fact)
        told.append([one for one in commands if "64 bits" in str(one.body.reason)])
    assert [len(one) for one in told] == [1, 1, 0, 0]


class Wild:
    """Events with whatever fields of the right types."""

    types = get_args(EventBody)

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def event(self) -> EventBody:
        kind = self.rng.choice(self.types)
        return kind(**{key: self.field(key, hint) for key, hint in get_type_hints(kind).items()})

    def field(self, key: str, hint: Any) -> Any:
        rng = self.rng
        if key == "job" and rng.random() < 0.8:
            return rng.choice((1, 2))
        if key == "generation" and rng.random() < 0.7:
            return 1
        return self.value(hint)

    def value(self, hint: Any) -> Any:
        rng, words = self.rng, str(hint)
        if hint is bool:
            return rng.random() < 0.5
        if hint is int:
            return rng.choice(NUMBERS)
        if hint is str:
            return rng.choice(TEXTS)
        if words.startswith("dict[str"):
            return {rng.choice(TEXTS): rng.choice(NUMBERS) for _ in range(rng.randrange(3))}
        if words.startswith("tuple[int, int]"):
            return (rng.choice(NUMBERS), rng.choice(NUMBERS))
        if words.startswith("tuple[int"):
            return tuple(rng.choice(NUMBERS) for _ in range(rng.randrange(3)))
        if words.startswith("tuple[str"):
            return tuple(rng.choice(TEXTS) for _ in range(rng.randrange(3)))
        if words.startswith("tuple[tuple[int"):
            pairs = ((rng.choice(NUMBERS), rng.choice(NUMBERS)) for _ in range(rng.randrange(4)))
            return tuple(pairs)
        if "Literal" in words:
            return rng.choice(get_args(hint))
        return self.struct(hint)

    def struct(self, hint: Any) -> Struct | tuple[()] | None:
        rng = self.rng
        if hint == Policy | None:
            return rng.choice((None, Policy()))
        if hint is Inventory:
            holding = Holding(rng.choice((1, 2, 99)), 1, "running", rng.choice(NUMBERS), 5)
            return Inventory(rng.choice((0, 1, 5)), (holding,) * rng.randrange(2))
        if hint is Node:
            name = rng.choice(("n0", "n1", "new", NO_TEXT))
            return Node(name=name, gpus=rng.choice((8, 4, 0)), kind=rng.choice(("h100", "a|b")))
        if hint is JobSpec:
            return JobSpec(
                name=rng.choice(TEXTS),
                team=rng.choice(TEXTS),
                gang=GangShape(replicas=rng.choice(NUMBERS), slot_gpus=rng.choice((1, 8, 0))),
                expected=Expected(steps=rng.choice(NUMBERS), exposed_ns=rng.choice(NUMBERS)),
                time_limit_ns=rng.choice(NUMBERS),
                budget_gpu_seconds=rng.choice(NUMBERS),
            )
        if hint is SpecChange:
            spec = self.struct(JobSpec)
            assert isinstance(spec, JobSpec)
            return SpecChange(spec=spec, settings=(rng.choice(TEXTS),), by=rng.choice(TEXTS))
        return ()  # steps of a workflow


@pytest.mark.parametrize("seed", range(60))
def test_no_event_whatsoever_breaks_the_core(seed: int) -> None:
    wild, drive = Wild(seed), Drive(4)
    drive.running()
    drive.submit(gang=GangShape(replicas=1, tensor=8, slot_gpus=8))
    for _ in range(15):
        drive.tell(wild.event(), wild.rng.choice((0, SECOND, 100 * SECOND)))
        check(drive.core)
        kept = drive.core.snapshot()
        drive.core = Core.restore(kept)
        assert drive.core.snapshot() == kept


def test_times_beyond_ten_years_are_refused() -> None:
    drive = Drive()
    for fields in ({"time_limit_ns": 1 << 61}, {"expected": Expected(start_ns=1 << 61)}):
        spec = JobSpec(**{"name": "x", "gang": SHAPE, **fields})
        (command,) = drive.tell(Submit(spec=spec))
        assert isinstance(command.body, Refuse) and "ten years" in str(command.body.reason)


def test_a_job_that_would_train_for_centuries_stands_in_nobodys_way() -> None:
    drive = Drive(2)
    job = drive.running(expected=Expected(steps=10**9, step_ns=10 * SECOND))
    drive.submit(expected=Expected(steps=1 << 62, step_ns=10 * SECOND))
    for number in drive.core.view.pending:
        explain(drive.core.queue, drive.core.view, number)
    drive.train(job, 10)
    assert Core.restore(drive.core.snapshot()).snapshot() == drive.core.snapshot()


def test_a_rail_that_a_node_does_not_have_is_not_marked() -> None:
    drive = Drive(2)
    drive.tell(DeviceError(node=0, cause="rail", rail=8))
    assert drive.core.view.fleet.rails_down(0) == 0
    drive.tell(DeviceError(node=0, cause="rail", rail=7))
    assert drive.core.view.fleet.rails_down(0) == 1 << 7
