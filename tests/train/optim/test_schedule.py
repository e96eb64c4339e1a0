"""Learning rates against closed forms, at the edges too."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from phalanx.config import Job, Schedule, ScheduleExtension, Train
from phalanx.train.optim.schedule import learning_rate_factor as factor
from phalanx.train.optim.schedule import rewritten_rate


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
def test_warm_up_grows_linearly_to_the_peak(kind: str) -> None:
    schedule = Schedule(kind=kind, warmup_steps=4, decay_steps=2 if kind == "wsd" else 0)  # type: ignore[arg-type]
    assert [factor(schedule, step, 20) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert (factor(schedule, 4, 20) < 1.0) == (kind in ("cosine", "linear"))


@pytest.mark.parametrize("fraction", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("warmup_steps", [0, 1, 7])
@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_the_last_step_has_exactly_the_final_fraction(
    kind: str, warmup_steps: int, fraction: float
) -> None:
    schedule = Schedule(
        kind=kind,  # type: ignore[arg-type]
        warmup_steps=warmup_steps,
        decay_steps=5 if kind == "wsd" else 0,
        final_fraction=fraction,
    )
    assert factor(schedule, 39, 40) == fraction
    assert fraction == 1.0 or factor(schedule, 38, 40) > fraction


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_without_warm_up_the_first_step_has_the_peak(kind: str) -> None:
    schedule = Schedule(kind=kind, decay_steps=2 if kind == "wsd" else 0)  # type: ignore[arg-type]
    assert factor(schedule, 0, 10) == 1.0


def test_cosine_follows_half_a_wave_from_the_warm_up_to_the_end() -> None:
    schedule = Schedule(kind="cosine", warmup_steps=10, final_fraction=0.1)
    for made in range(10, 111):
        wave = 0.5 * (1 + math.cos(math.pi * (made - 10) / 100))
        assert factor(schedule, made - 1, 110) == pytest.approx(0.1 + 0.9 * wave)
    assert factor(schedule, 59, 110) == pytest.approx(0.55)


def test_wsd_is_stable_then_falls_linearly() -> None:
    schedule = Schedule(kind="wsd", warmup_steps=5, decay_steps=20, final_fraction=0.2)
    assert {factor(schedule, step, 100) for step in range(4, 80)} == {1.0}
    for made in range(80, 101):
        assert factor(schedule, made - 1, 100) == pytest.approx(1 - 0.8 * (made - 80) / 20)


def test_constant_stays() -> None:
    schedule = Schedule(kind="constant", final_fraction=0.0)
    assert {factor(schedule, step, 50) for step in range(60)} == {1.0}


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_steps_past_the_end_keep_the_final_rate(kind: str) -> None:
    schedule = Schedule(kind=kind, decay_steps=5 if kind == "wsd" else 0, final_fraction=0.3)  # type: ignore[arg-type]
    assert factor(schedule, 10_000, 50) == pytest.approx(0.3)


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_a_run_that_is_all_warm_up_divides_by_nothing(kind: str) -> None:
    schedule = Schedule(kind=kind, warmup_steps=5, decay_steps=5 if kind == "wsd" else 0)  # type: ignore[arg-type]
    assert factor(schedule, 4, 5) == 1.0


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_the_rate_never_rises_after_the_warm_up(kind: str) -> None:
    schedule = Schedule(kind=kind, warmup_steps=7, decay_steps=30 if kind == "wsd" else 0)  # type: ignore[arg-type]
    factors = [factor(schedule, step, 64) for step in range(7, 65)]
    assert factors == sorted(factors, reverse=True)
    assert all(0.1 <= value <= 1.0 for value in factors)


def test_linear_is_a_straight_line_from_the_warm_up_to_the_end() -> None:
    schedule = Schedule(kind="linear", warmup_steps=10, final_fraction=0.2)
    for made in range(10, 51):
        assert factor(schedule, made - 1, 50) == pytest.approx(1 - 0.8 * (made - 10) / 40)


@pytest.mark.parametrize(
    ("shape", "left"),
    [
        ("linear", lambda done: 1 - done),
        ("cosine", lambda done: (1 + math.cos(math.pi * done)) / 2),
        ("sqrt", lambda done: 1 - math.sqrt(done)),
    ],
)
def test_the_final_decay_has_the_shape_that_is_asked_for(
    shape: str, left: Callable[[float], float]
) -> None:
    schedule = Schedule(kind="wsd", decay_steps=20, decay_shape=shape, final_fraction=0.0)  # type: ignore[arg-type]
    for made in range(80, 101):
        assert factor(schedule, made - 1, 100) == pytest.approx(left((made - 80) / 20), abs=1e-12)


LONGER = Schedule(
    kind="cosine",
    warmup_steps=2,
    extensions=(
        ScheduleExtension(at_step=20, kind="wsd", warmup_steps=4, peak_fraction=0.5, decay_steps=5),
        ScheduleExtension(at_step=40, kind="constant", peak_fraction=0.2),
    ),
)


def test_a_curve_that_follows_leaves_the_one_before_it_as_it_was() -> None:
    before = Schedule(kind="cosine", warmup_steps=2)
    for step in range(20):
        assert factor(LONGER, step, 60) == factor(before, step, 20)


def test_a_curve_that_follows_grows_from_the_rate_before_it_to_its_own_peak() -> None:
    grown = [factor(LONGER, step, 60) for step in range(20, 24)]
    assert grown == pytest.approx([0.2, 0.3, 0.4, 0.5])
    assert factor(LONGER, 34, 60) == 0.5 and factor(LONGER, 39, 60) == pytest.approx(0.05)
    assert {factor(LONGER, step, 60) for step in range(40, 60)} == {0.2}


def test_a_curve_may_end_before_the_run() -> None:
    schedule = Schedule(kind="linear", steps=10, final_fraction=0.3)
    assert factor(schedule, 4, 50) == factor(Schedule(kind="linear", final_fraction=0.3), 4, 10)
    assert {factor(schedule, step, 50) for step in range(9, 50)} == {0.3}


def longer(schedule: Schedule, steps: int) -> Job:
    return Job(schedule=schedule, train=Train(steps=steps))


WAS = {"schedule": {"kind": "cosine"}, "train": {"steps": 20}}


def test_a_resumed_run_is_told_where_its_rate_jumps() -> None:
    told = rewritten_rate(longer(Schedule(), 40), WAS, 20)
    assert "from 0.1 to" in told and "schedule.steps = 20" in told and "at_step = 20" in told


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(steps=20),
        Schedule(extensions=(ScheduleExtension(at_step=20),)),
        Schedule(steps=20, extensions=(ScheduleExtension(at_step=20, warmup_steps=3),)),
    ],
)
def test_a_run_that_keeps_its_curve_or_says_what_follows_is_told_nothing(
    schedule: Schedule,
) -> None:
    assert rewritten_rate(longer(schedule, 40), WAS, 20) == ""


@pytest.mark.parametrize(("made", "jumps"), [(10, False), (18, True)])
def test_a_stable_rate_may_last_longer_until_its_decay_has_begun(made: int, jumps: bool) -> None:
    wsd = Schedule(kind="wsd", decay_steps=5)
    was = {"schedule": {"kind": "wsd", "decay_steps": 5}, "train": {"steps": 20}}
    assert bool(rewritten_rate(longer(wsd, 40), was, made)) == jumps


def test_a_longer_warmup_of_a_constant_rate_is_told_with_what_keeps_it() -> None:
    was = {"schedule": {"kind": "constant", "warmup_steps": 3}, "train": {"steps": 20}}
    told = rewritten_rate(longer(Schedule(kind="constant", warmup_steps=8), 40), was, 6)
    assert told.endswith("To keep it, set schedule.warmup_steps = 3")


def test_nothing_is_said_of_a_run_without_steps_or_of_another_version() -> None:
    assert rewritten_rate(longer(Schedule(), 40), WAS, 0) == ""
    unknown = {"schedule": {"kind": "spiral"}, "train": {"steps": 20}}
    assert rewritten_rate(longer(Schedule(), 40), unknown, 5) == ""
