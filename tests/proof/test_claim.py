"""A claim fails when it misses its bar or falls below its own history, and only then."""

from __future__ import annotations

import math

import pytest

from proof.claim import Claim, Figure, judge

SECONDS = Figure("seconds", "how long", "s", at_most=2.0)
RATE = Figure("rate", "how fast", "/s", at_least=100.0)
COUNT = Figure("violations", "violations", at_most=0, timed=False)
CLAIM = Claim(name="c", says="", command="python -m c", figures=(SECONDS, RATE, COUNT), minutes=1)
GOOD = {"seconds": 1.0, "rate": 200.0, "violations": 0.0}


def problems(
    measured: dict[str, float],
    before: dict[str, float] | None = None,
    trusted: bool = True,
    slower: float = 1.0,
) -> dict[str, str]:
    verdicts = judge(CLAIM, measured, before or {}, trusted=trusted, slower=slower)
    return {verdict.figure.name: verdict.problem for verdict in verdicts if verdict.problem}


def test_figures_that_meet_their_bars_hold() -> None:
    assert problems(GOOD) == {}
    assert problems({**GOOD, "seconds": 2.0, "rate": 100.0}) == {}


@pytest.mark.parametrize(
    ("name", "value"), [("seconds", 2.1), ("rate", 99.0), ("violations", 1.0), ("rate", math.nan)]
)
def test_a_missed_bar_is_a_failure(name: str, value: float) -> None:
    found = problems({**GOOD, name: value})
    assert list(found) == [name] and "its bar is" in found[name]


def test_a_figure_that_is_not_reported_is_a_failure() -> None:
    assert problems({"seconds": 1.0, "rate": 200.0}) == {
        "violations": "the command did not report it"
    }


@pytest.mark.parametrize(
    ("name", "value", "fails"),
    [
        ("seconds", 1.09, False),
        ("seconds", 1.2, True),
        ("rate", 185.0, False),
        ("rate", 170.0, True),
    ],
)
def test_more_than_a_tenth_below_its_history_is_a_failure(
    name: str, value: float, fails: bool
) -> None:
    found = problems({**GOOD, name: value}, before=GOOD)
    assert bool(found) == fails
    assert not fails or "before" in found[name]


def test_on_a_slower_machine_times_may_be_longer_by_as_much_and_counts_may_not() -> None:
    late = {"seconds": 2.5, "rate": 80.0, "violations": 0.0}
    assert problems(late).keys() == {"seconds", "rate"}
    assert problems(late, slower=1.3) == {}
    assert problems({**late, "violations": 1.0}, slower=1.3).keys() == {"violations"}
    assert problems({**GOOD, "rate": 150.0}, before=GOOD, slower=1.3) == {}
    assert problems({**GOOD, "rate": 130.0}, before=GOOD, slower=1.3).keys() == {"rate"}


def test_on_busy_cores_only_what_does_not_depend_on_the_machine_is_judged() -> None:
    assert problems({"seconds": 9.0, "rate": 1.0, "violations": 0.0}, trusted=False) == {}
    assert list(problems({**GOOD, "violations": 3.0}, trusted=False)) == ["violations"]


@pytest.mark.parametrize(
    ("figure", "value", "words"),
    [
        (SECONDS, 1.0234, "1.02 s"),
        (SECONDS, 0.0012, "0.0012 s"),
        (RATE, 32_912.4, "32,912/s"),
        (Figure("share", "", "%"), 0.0207, "2.07 %"),
        (Figure("ratio", "", "x"), 1.0649, "1.06×"),
        (COUNT, 0.0, "0"),
    ],
)
def test_a_value_is_shown_as_people_read_it(figure: Figure, value: float, words: str) -> None:
    assert figure.show(value) == words
