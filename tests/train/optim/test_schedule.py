"""Learning rates against closed forms, at the edges too."""

from __future__ import annotations

import math

import pytest

from phalanx.config import Schedule
from phalanx.train.optim.schedule import learning_rate_factor as factor


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_warm_up_grows_linearly_to_the_peak(kind: str) -> None:
    schedule = Schedule(kind=kind, warmup_steps=4, decay_steps=2 if kind == "wsd" else 0)  # type: ignore[arg-type]
    assert [factor(schedule, step, 20) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert (factor(schedule, 4, 20) < 1.0) == (kind == "cosine")


@pytest.mark.parametrize("fraction", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("warmup_steps", [0, 1, 7])
@pytest.mark.parametrize("kind", ["cosine", "wsd"])
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


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_steps_past_the_end_keep_the_final_rate(kind: str) -> None:
    schedule = Schedule(kind=kind, decay_steps=5 if kind == "wsd" else 0, final_fraction=0.3)  # type: ignore[arg-type]
    assert factor(schedule, 10_000, 50) == pytest.approx(0.3)


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_a_run_that_is_all_warm_up_divides_by_nothing(kind: str) -> None:
    schedule = Schedule(kind=kind, warmup_steps=5, decay_steps=5 if kind == "wsd" else 0)  # type: ignore[arg-type]
    assert factor(schedule, 4, 5) == 1.0


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_the_rate_never_rises_after_the_warm_up(kind: str) -> None:
    schedule = Schedule(kind=kind, warmup_steps=7, decay_steps=30 if kind == "wsd" else 0)  # type: ignore[arg-type]
    factors = [factor(schedule, step, 64) for step in range(7, 65)]
    assert factors == sorted(factors, reverse=True)
    assert all(0.1 <= value <= 1.0 for value in factors)
