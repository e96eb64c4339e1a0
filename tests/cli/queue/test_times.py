"""Times and spans as people write them."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from phalanx.cli.queue.times import past_ns, span_seconds, time_ns
from phalanx.config import ConfigError

ZONE = timezone(timedelta(hours=2))
NOW = datetime(2026, 11, 18, 9, 30, tzinfo=ZONE)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10:00", datetime(2026, 11, 18, 10, 0, tzinfo=ZONE)),
        ("09:00", datetime(2026, 11, 19, 9, 0, tzinfo=ZONE)),
        ("2026-12-01", datetime(2026, 12, 1, tzinfo=ZONE)),
        ("2026-12-01T08:15", datetime(2026, 12, 1, 8, 15, tzinfo=ZONE)),
        ("2026-12-01T08:15+00:00", datetime(2026, 12, 1, 10, 15, tzinfo=ZONE)),
        ("+2h", NOW + timedelta(hours=2)),
        ("now+90m", NOW + timedelta(minutes=90)),
    ],
)
def test_a_time_is_a_moment(text: str, expected: datetime) -> None:
    assert time_ns("--begin", text, NOW) == int(expected.timestamp()) * 10**9


NO_TIMES = ["", "soon", "25:00", "+", "+2", "2026-13-01", "10:7"]
TOO_LATE = ["+99999999999d", "9999-12-31", "2101-01-01"]


@pytest.mark.parametrize("text", [*NO_TIMES, *TOO_LATE])
def test_what_is_no_time_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--begin = .*e\.g\. "):
        time_ns("--begin", text, NOW)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90m", NOW - timedelta(minutes=90)),
        ("09:00", datetime(2026, 11, 18, 9, 0, tzinfo=ZONE)),
        ("10:00", datetime(2026, 11, 17, 10, 0, tzinfo=ZONE)),
        ("2026-11-01T08:15", datetime(2026, 11, 1, 8, 15, tzinfo=ZONE)),
    ],
)
def test_a_past_time_is_the_last_of_its_kind(text: str, expected: datetime) -> None:
    assert past_ns("--since", text, NOW) == int(expected.timestamp()) * 10**9


def test_what_is_no_past_time_is_refused_with_examples() -> None:
    with pytest.raises(ConfigError, match=r"--since = .*e\.g\. 90m"):
        past_ns("--since", "lately", NOW)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("1.5h", 5400), ("2d", 172_800)])
def test_a_span_has_a_unit(text: str, seconds: float) -> None:
    assert span_seconds("--for", text) == seconds


@pytest.mark.parametrize("text", ["99999999999d", "", "4", "0h", "-1h", "4 hours"])
def test_what_is_no_span_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match=r"e\.g\. 90m, 4h or 2d"):
        span_seconds("--for", text)
