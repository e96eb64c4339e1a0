"""What may come in at all: depth, size, count and range of everything in a request's body.

Types alone bound nothing: a list of a million numbers is a list. Whatever passes here can be
decoded, stored, replayed and shown by code that recurses, copies and sorts.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

MOST_DEPTH = 32
MOST_VALUES = 100_000  # in one body
MOST_ITEMS = 20_000  # in one list: a reservation may name every node of a fleet
MOST_FIELDS = 1_000  # in one table: the environment of a program
MOST_CHARACTERS = 128 << 10  # in one text: what Linux takes as one argument of a program
MOST_TEXT_CHARACTERS = 1 << 20  # in the text of a job file
MOST_NAME_CHARACTERS = 256
MOST_NUMBER = 1 << 62
TEXTS = ("toml", "text")  # fields that hold a file


class OversizedBodyError(ValueError):
    """A body with more in it than is taken from anybody."""


def read_body(data: bytes) -> Any:
    """A body's JSON as plain values, all within bounds."""
    value = msgspec.json.decode(data)
    check(value)
    return value


def check(value: Any) -> None:
    """OversizedBodyError where a value holds too much; by levels, so that depth costs nothing."""
    level, seen = [("", value)], 0
    for _ in range(MOST_DEPTH + 1):
        below: list[tuple[str, Any]] = []
        for name, each in level:
            if isinstance(each, dict):
                below += _fields(name, each)
            elif isinstance(each, list):
                if len(each) > MOST_ITEMS:
                    raise OversizedBodyError(f"{_where(name)} has more than {MOST_ITEMS} entries")
                below += [(name, item) for item in each]
            else:
                _scalar(name, each)
        seen += len(below)
        if seen > MOST_VALUES:
            raise OversizedBodyError(f"at most {MOST_VALUES} values are taken in one request")
        if not below:
            return
        level = below
    raise OversizedBodyError(f"it is nested too deeply: at most {MOST_DEPTH} levels are taken")


def _fields(name: str, table: dict[str, Any]) -> list[tuple[str, Any]]:
    if len(table) > MOST_FIELDS:
        raise OversizedBodyError(f"{_where(name)} has more than {MOST_FIELDS} fields")
    for key in table:
        if len(key) > MOST_NAME_CHARACTERS or "\0" in key:
            raise OversizedBodyError(
                f"the name of a field in {_where(name)} is too long, or no text"
            )
    return list(table.items())


def _scalar(name: str, value: Any) -> None:
    if isinstance(value, str):
        most = MOST_TEXT_CHARACTERS if name in TEXTS else MOST_CHARACTERS
        if len(value) > most:
            raise OversizedBodyError(f"{_where(name)} has more than {most} characters")
        if "\0" in value:
            raise OversizedBodyError(f"{_where(name)} has a NUL character")
    elif isinstance(value, int) and abs(value) > MOST_NUMBER:
        raise OversizedBodyError(f"{_where(name)} must be within +-{MOST_NUMBER}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise OversizedBodyError(f"{_where(name)} must be a finite number")


def _where(name: str) -> str:
    return name[:MOST_NAME_CHARACTERS] or "the body"
