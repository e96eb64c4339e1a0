"""Why something was decided: a code and its facts as data, and the sentence a person reads."""

from __future__ import annotations

from itertools import pairwise

from msgspec import Struct

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


# One line a code. A code that is not here reads as its words with the facts behind them.
SENTENCES: dict[str, str] = {}


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


def sentences(table: dict[str, str]) -> None:
    """Adds a module's sentences; a code has one owner."""
    twice = [code for code in table if code in SENTENCES]
    assert not twice, f"reasons written twice: {twice}"
    SENTENCES.update(table)
