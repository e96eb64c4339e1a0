"""Submissions: the jobs of an array enter the queue at once, each in its place."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.cluster.context import Context
from phalanx.cluster.core import Core
from phalanx.cluster.gang import fence
from phalanx.cluster.job_relations import Array, SweepTrial
from phalanx.cluster.jobs.job import LONGEST_NS, Expected, GangShape, JobSpec
from phalanx.cluster.policy import Policy
from phalanx.cluster.protocol.commands import Accept, Form, Refuse
from phalanx.cluster.protocol.events import Cancel, Event, EventBody, Submit, Tick
from tests.cluster.fleets import fleet_of

SECOND = 10**9


def handle(core: Core, body: EventBody, at_ns: int = 0) -> list[object]:
    return [one.body for one in core.handle(Event(core.sequence + 1, at_ns, body))]


def submit(core: Core, count: int = 0, **spec: object) -> list[object]:
    array = Array(count) if count else None
    full = JobSpec(name="j", gang=GangShape(slot_gpus=8), array=array, **spec)  # type: ignore[arg-type]
    return handle(core, Submit(spec=full))


def started(core: Core) -> list[int]:
    """Jobs that start at the next look at the queue."""
    at_ns = core.next_deadline_ns()
    assert at_ns is not None
    return [body.job for body in handle(core, Tick(), at_ns) if isinstance(body, Form)]


def test_jobs_of_an_array_wait_behind_those_that_came_before_and_start_in_order() -> None:
    core = Core(fleet_of(4), Policy())
    submit(core)
    submit(core, 5)
    submit(core)
    assert list(core.view.pending) == [1, 2, 3, 4, 5, 6, 7]
    assert started(core) == [1, 2, 3, 4]


def test_an_array_that_is_held_is_not_in_the_queue() -> None:
    core = Core(fleet_of(4), Policy())
    told = submit(core, 3, held=True)
    assert [type(body) for body in told] == [Accept]
    assert not core.view.pending and not len(core.queue.waiting)


def test_all_jobs_of_an_array_together_look_once_at_those_that_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core, looks = Core(fleet_of(4), Policy()), list[JobSpec]()
    submit(core, 50, reports_steps=False)
    for number in list(core.view.jobs):
        handle(core, Cancel(job=number))

    def predecessor(ctx: Context, spec: JobSpec) -> int:
        looks.append(spec)
        return 7

    monkeypatch.setattr(fence, "predecessor", predecessor)
    submit(core, 50, reports_steps=False)
    assert len(looks) == 1
    assert {job.follows for job in core.view.jobs.values() if not job.ended} == {7}


def test_a_restored_core_starts_the_rest_of_an_array_alike() -> None:
    core = Core(fleet_of(2), Policy())
    submit(core, 6)
    again = Core.restore(core.snapshot())
    assert started(core) == started(again) == [1, 2]
    assert core.snapshot() == again.snapshot()


@pytest.mark.parametrize(
    ("expected", "key"),
    [
        (Expected(step_ns=1, flush_ns=LONGEST_NS + 1), "expected.flush_ns"),
        (Expected(step_ns=1, start_ns=-1), "expected.start_ns"),
    ],
)
def test_times_that_cannot_be_are_refused_by_name(expected: Expected, key: str) -> None:
    (told,) = submit(Core(fleet_of(1), Policy()), expected=expected)
    assert isinstance(told, Refuse) and key in str(told.reason)


def test_a_time_limit_of_more_than_ten_years_is_refused() -> None:
    (told,) = submit(Core(fleet_of(1), Policy()), time_limit_ns=LONGEST_NS + 1)
    assert isinstance(told, Refuse) and "time_limit_ns" in str(told.reason)


def test_a_trial_of_a_sweep_is_one_job_until_it_fails_or_is_cancelled() -> None:
    core = Core(fleet_of(4), Policy())
    trial = SweepTrial(sweep="rates", number=3, steps=10)

    def job_of(**spec: object) -> int:
        (answer,) = submit(core, trial=trial, **spec)
        assert isinstance(answer, Accept)
        return answer.job

    first = job_of()
    core = Core.restore(core.snapshot())
    assert job_of() == first and len(core.view.jobs) == 1
    assert job_of(team="other") > first, "another team's sweep of this name"
    handle(core, Cancel(job=first))
    assert job_of() > first + 1


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"trial": SweepTrial(sweep="a\x1b", number=0, steps=1)}, "trial"),
        ({"trial": SweepTrial(sweep="a", number=-1, steps=1)}, "trial.number"),
        ({"trial": SweepTrial(sweep="a", number=0, steps=1), "count": 2}, "array"),
        ({"time_min_ns": 10}, "time_min_ns"),
        ({"time_min_ns": -1}, "time_min_ns"),
    ],
)
def test_senseless_trials_and_limits_are_refused(fields: dict[str, Any], key: str) -> None:
    (answer,) = submit(Core(fleet_of(1), Policy()), **fields)
    assert isinstance(answer, Refuse) and dict(answer.reason.facts)["key"] == key
