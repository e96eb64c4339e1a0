"""Why something was decided: a code and its facts as data, and the sentence a person reads."""

from __future__ import annotations

from enum import StrEnum
from itertools import pairwise
from typing import Self

from msgspec import Struct

from phalanx.cluster.sentences import SENTENCES

Fact = int | str


class Reason(Struct, frozen=True):
    """A decision's reason. ``code`` is for machines; ``facts`` fill the sentence of the code."""

    code: str
    facts: dict[str, Fact] = {}

    def __str__(self) -> str:
        sentence = SENTENCES.get(self.code)
        if sentence is None:
            known = ", ".join(f"{name} {value}" for name, value in self.facts.items())
            return self.code.replace("_", " ") + (f" ({known})" if known else "")
        return sentence.format_map(self.facts)


def reason(code: str, **facts: Fact) -> Reason:
    """A reason with its facts as keywords."""
    return Reason(code, facts)


class Code(StrEnum):
    """Codes that a decision depends on: it branches on the member that a reason was made from."""

    def because(self, **facts: Fact) -> Reason:
        """A reason with this code, and its facts as keywords."""
        return Reason(self.value, facts)

    @classmethod
    def of(cls, why: Reason) -> Self | None:
        """The member that a reason was made from; None: from none of these."""
        found = cls._value2member_map_.get(why.code)
        return found if isinstance(found, cls) else None


def in_gpu_hours(gpu_seconds: int) -> str:
    """As a sentence gives it: no more digits than it needs, and never 0 for something."""
    hours = gpu_seconds / 3600
    return f"{hours:.0f}" if hours >= 100 else f"{hours:.3g}"


def span_of(span_ns: int) -> str:
    """A time for a person: its two largest units."""
    seconds = -(-span_ns // 10**9)
    units = [(86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")]
    for (large, name), (small, below) in pairwise(units):
        if seconds >= large:
            rest = seconds % large // small
            return f"{seconds // large} {name}" + (f" {rest} {below}" if rest else "")
    return f"{seconds} s"


# What people say of times to come: a number between two of these would claim too much.
_ROUND_SECONDS = (
    *(60 * n for n in (1, 2, 3, 5, 10, 15, 20, 30, 45)),
    *(3_600 * n for n in (1, 2, 3, 4, 6, 8, 12, 18)),
    *(86_400 * n for n in (1, 2, 3, 5, 7, 10, 14, 21, 30, 45, 60, 90, 120, 180, 365)),
)


def about(span_ns: int) -> str:
    """A time that is estimated, as a rounded range: a fifth less or a quarter more is likely."""
    seconds = max(0, span_ns) // 10**9
    if 5 * seconds < 4 * _ROUND_SECONDS[0]:
        return "less than a minute"
    low = max((n for n in _ROUND_SECONDS if 5 * n <= 4 * seconds), default=_ROUND_SECONDS[0])
    high = next((n for n in _ROUND_SECONDS if 4 * n >= 5 * seconds), 0)
    if not high:
        return "more than a year"
    shortest, longest = span_of(low * 10**9), span_of(high * 10**9)
    if low == high:
        return longest
    if shortest.split(" ")[1:] == longest.split(" ")[1:]:
        shortest = shortest.split(" ")[0]
    return f"{shortest} to {longest}"
