"""The performance checklist: a table of points, and the registry of checks."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from docs.generator.markdown import code, prose, table
from phalanx.doctor.checks.registry import SETTINGS
from phalanx.doctor.node import CHECKS

TABLE = Path(__file__).parent / "checklist.toml"
WHO = {
    "node": "a check of a node",
    "tool": "a planner, tuner or profiler",
    "practice": "people",
}
BY = {
    "checked": "checked by",
    "tuned": "tuned by",
    "planned": "planned by",
    "measured": "measured by",
    "built in": "built in",
    "not yet": "not yet",
    "not ours": "not ours",
}
UNSERVED = ("not yet", "not ours")


class Point(NamedTuple):
    """One point of the checklist."""

    section: str
    who: str  # can decide it: a key of WHO
    text: str
    by: str  # a key of BY
    how: str  # of a checked one, the ids of its checks
    command: str

    @property
    def served(self) -> bool:
        """Whether Phalanx does something about it."""
        return self.by not in UNSERVED

    @property
    def checks(self) -> list[str]:
        """Of the registry, that decide it."""
        return self.how.split() if self.by == "checked" else []


def points() -> list[Point]:
    """The whole table; ValueError where a row is not understood."""
    with TABLE.open("rb") as file:
        sections = tomllib.load(file)["section"]
    found = [Point(section["title"], *row) for section in sections for row in section["points"]]
    for point in found:
        unknown = [name for name in point.checks if name not in SETTINGS and name not in CHECKS]
        if point.who not in WHO or point.by not in BY or unknown:
            raise ValueError(f"{point.text!r}: {point.who}, {point.by}, {unknown}")
    return found


def lines() -> list[str]:
    """The page: counts, every point by section, every check."""
    every = points()
    return [*_counts(every), *_sections(every), *_checks()]


def _counts(every: list[Point]) -> Iterator[str]:
    total, served = Counter(p.who for p in every), Counter(p.who for p in every if p.served)
    rows = [(words, str(total[who]), str(served[who])) for who, words in WHO.items()]
    yield from table(
        ("decided by", "points", "Phalanx does something about"),
        [*rows, ("all", str(len(every)), str(sum(served.values())))],
    )
    yield ""


def _sections(every: list[Point]) -> Iterator[str]:
    number = 0
    for section in dict.fromkeys(point.section for point in every):
        yield from (f"## {section}", "")
        rows = []
        for point in every:
            if point.section == section:
                number += 1
                rows.append((str(number), prose(point.text), point.who, *_answer(point)))
        yield from table(("", "point", "who", "what Phalanx does", "command"), rows)
        yield ""


def _answer(point: Point) -> tuple[str, str]:
    if point.by == "checked":
        command = "phalanx doctor node " + " ".join(f"--only {name}" for name in point.checks)
        names = ", ".join(code(name) for name in point.checks)
        return f"checked by {names}", code(command)
    how = prose(point.how)
    join = " " if BY[point.by].endswith("by") and how.startswith("`") else ": "
    if not how and BY[point.by].endswith("by"):
        return point.by, code(point.command)  # by the command beside it
    return f"{BY[point.by]}{join}{how}" if how else BY[point.by], code(point.command)


def _checks() -> Iterator[str]:
    yield from ("## Every check of settings", "")
    yield "`phalanx doctor node --only ID`; severities: critical (wrong numbers, or a job that does"
    yield "not run), high (a factor of some rate), medium (percents of a step), low (now and then)."
    yield ""
    rows = [
        (code(check.id), check.severity, prose(check.expected), prose(check.why))
        for check in SETTINGS.values()
    ]
    yield from table(("check", "severity", "expected", "why"), rows)
    yield ""
