"""Where time is short, the most outdated claims are measured first, and none that does not fit."""

from __future__ import annotations

import pytest

from proof import __main__ as command
from proof.choice import most_outdated_first, said_to_fit, that_fit
from proof.claim import Claim, Figure, Need
from proof.claims import CLAIMS
from tests.proof.test_history import measured


def claim(name: str, minutes: float = 1.0) -> Claim:
    rate = Figure("rate", "how fast", "/s", at_least=1.0)
    return Claim(name=name, says="", command=f"run {name}", figures=(rate,), minutes=minutes)


def names(claims: list[Claim]) -> list[str]:
    return [each.name for each in claims]


def test_claims_that_were_never_measured_come_first_and_the_newest_last() -> None:
    store = [
        measured("new", date="2026-11-18", command="run new"),
        measured("old", date="2026-11-16"),  # stored before commands were
        measured("later-that-day", date="2026-11-18"),
        measured("new", date="2026-11-19", trusted=False),  # not what is shown of it
    ]
    claims = [claim(name) for name in ("later-that-day", "new", "old", "never")]
    assert names(most_outdated_first(claims, store)) == ["never", "old", "new", "later-that-day"]


def test_what_nobody_should_trust_is_measured_before_what_is_old() -> None:
    store = [
        measured("old", date="2026-11-16"),
        measured("busy", date="2026-11-18", trusted=False),
        measured("changed", date="2026-11-18", command="run something else"),
        measured("other-figures", date="2026-11-18", figures={"before": 1.0}),
    ]
    claims = [claim(name) for name in ("old", "other-figures", "changed", "busy", "never")]
    order = names(most_outdated_first(claims, store))
    assert order == ["never", "busy", "changed", "other-figures", "old"]


def test_those_are_listed_that_fit_by_what_they_say() -> None:
    claims = [claim("a", 4), claim("too-long", 7), claim("b", 5), claim("c", 2), claim("d", 1)]
    assert names(said_to_fit(claims, 10)) == ["a", "b", "d"]
    assert said_to_fit(claims, 0.5) == []


def test_what_takes_less_than_it_says_leaves_time_for_more() -> None:
    now = 0.0
    waiting = that_fit([claim("a", 4), claim("b", 7), claim("c", 3)], 10, lambda: now)
    assert next(waiting).name == "a"
    now += 60  # it took one minute
    assert next(waiting).name == "b"
    now += 8 * 60
    assert next(waiting, None) is None  # one minute is left


def test_a_lent_gpu_is_used_for_as_long_as_it_is_lent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["proof", "--gpu", "--minutes", "30", "--list"]
    monkeypatch.setattr("sys.argv", words)
    assert command.main() == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    listed = [CLAIMS[line.split()[0]] for line in lines]
    assert listed and all(Need.CUDA in each.needs for each in listed)
    assert sum(each.minutes for each in listed) <= 30
