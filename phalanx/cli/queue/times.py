"""Times and spans as people write them: 08:00, 2026-11-19T08:00, +2h; 90m, 4h, 2d."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from phalanx.config import ConfigError

LAST_YEAR = 2100  # what is later is a slip of the hand, and no number of nanoseconds
_LONGEST_SECONDS = 50 * 365 * 86_400
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?")
SPAN_HINT = "e.g. 90m, 4h or 2d"
TIME_HINT = "e.g. 08:00, 2026-11-19T08:00, or +2h from now"
PAST_HINT = "e.g. 90m, 08:00 or 2026-11-19T08:00"


def span_seconds(key: str, text: str) -> float:
    """A length of time in seconds; ConfigError where it is none."""
    match = _SPAN.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(key, f'"{text}"', "is no length of time", SPAN_HINT)
    seconds = float(match[1]) * _UNITS[match[2]]
    if seconds > _LONGEST_SECONDS:
        raise ConfigError(key, f'"{text}"', "is longer than 50 years", SPAN_HINT)
    return seconds


def time_ns(key: str, text: str, now: datetime) -> int:
    """A moment since 1970; a time of day is the next one. ConfigError where it is none.

    ``now`` has a zone: times without one are in that.
    """
    moment = _moment(key, text.strip(), now)
    if moment.year > LAST_YEAR:
        raise ConfigError(key, f'"{text}"', f"is after the year {LAST_YEAR}", TIME_HINT)
    return round(moment.timestamp()) * 10**9


def past_ns(key: str, text: str, now: datetime) -> int:
    """A moment that has been, since 1970: so long ago (90m), a time of day, or a date."""
    if _SPAN.fullmatch(text.strip()):
        return round((now.timestamp() - span_seconds(key, text)) * 1e9)
    try:
        moment = _moment(key, text.strip(), now)
    except ConfigError:
        raise ConfigError(key, f'"{text}"', "is no time", PAST_HINT) from None
    if _CLOCK.fullmatch(text.strip()) and moment > now:
        moment -= timedelta(days=1)
    return round(moment.timestamp() * 1e9)


def _moment(key: str, text: str, now: datetime) -> datetime:
    later = text.removeprefix("now")
    if later.startswith("+"):
        return now + timedelta(seconds=span_seconds(key, later[1:]))
    try:
        if clock := _CLOCK.fullmatch(text):
            hour, minute, second = (int(part or 0) for part in clock.groups())
            today = now.replace(hour=hour, minute=minute, second=second, microsecond=0)
            return today if today > now else today + timedelta(days=1)
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(key, f'"{text}"', "is no time", TIME_HINT) from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=now.tzinfo)
