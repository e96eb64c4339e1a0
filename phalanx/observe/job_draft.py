"""A job file while somebody writes it: every mistake with the line that it stands on."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence

from msgspec import Struct

from phalanx.config import (
    ConfigError,
    ConfigProblem,
    Job,
    check,
    default_world_size,
    job_from_table,
    resolve,
)
from phalanx.config.toml_text import parse_toml

MOST_TEXT = 256 << 10  # characters, as of a job that is submitted
_AT_LINE = re.compile(r"\(at line (\d+), column \d+\)")
_AT_END = re.compile(r"\(at end of document\)")
# Strings and comments are passed over whole, so that nothing in them looks like another.
_PASSED = re.compile(
    r"(\"\"\"(?:\\.|[^\\])*?\"\"\"|'''.*?''')|\"(?:\\.|[^\"\\\n])*\"|'[^'\n]*'|(#[^\n]*)",
    re.DOTALL,
)
_HEADER = re.compile(r"\s*\[\[?([^\[\]#]+)\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"\s*((?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*[A-Za-z0-9_\"'-]+)*)\s*=")
_NAME = re.compile(r"[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*'")
_INDEX = re.compile(r"\[\d+\]")


class DraftProblem(Struct, frozen=True, kw_only=True):
    """One mistake. ``line`` 0: of no line of the text, such as an override."""

    line: int
    key: str
    value: str
    rule: str
    fix: str


class DraftedJob(Struct, frozen=True, kw_only=True):
    """What a text describes: a job that can run, or why it cannot."""

    job: Job | None = None  # resolved
    ranks: int = 0
    problems: tuple[DraftProblem, ...] = ()


def drafted(text: str, settings: Sequence[str], ranks: int, devices: int) -> DraftedJob:
    """The job of a text with ``key=value`` laid over it; ``ranks`` 0: as many as is usual."""
    try:
        table = parse_toml(text, MOST_TEXT)
    except tomllib.TOMLDecodeError as error:
        return DraftedJob(problems=(_not_toml(text, str(error)),))
    try:
        job = job_from_table(table, settings)
        ranks = ranks or default_world_size(job, devices)
        check(job, ranks)
        job = resolve(job, ranks)
    except ConfigError as error:
        return DraftedJob(problems=placed(text, error.problems, settings))
    return DraftedJob(job=job, ranks=ranks)


def placed(
    text: str, problems: Sequence[ConfigProblem], settings: Sequence[str] = ()
) -> tuple[DraftProblem, ...]:
    """Mistakes with their lines, in the order of the text."""
    lines, over = key_lines(text), {each.partition("=")[0] for each in settings}
    located = [
        DraftProblem(
            line=0 if each.key in over else line_of(lines, each.key),
            key=each.key,
            value=each.value,
            rule=each.rule,
            fix=each.fix,
        )
        for each in problems
    ]
    return tuple(sorted(located, key=lambda each: each.line))


def line_of(lines: dict[str, int], key: str) -> int:
    """The line of a key, else of the table around it; 0: it stands nowhere."""
    names = _INDEX.sub("", key).split(".")
    while names:
        found = lines.get(".".join(names))
        if found is not None:
            return found
        names.pop()
    return 0


def key_lines(text: str) -> dict[str, int]:
    """The first line of every key and table of a TOML text, also of one that has mistakes."""
    blank = _PASSED.sub(_blank, text)
    lines: dict[str, int] = {}
    table: list[str] = []
    for number, line in enumerate(blank.split("\n"), 1):
        if header := _HEADER.match(line):
            table = _names(header[1])
            lines.setdefault(".".join(table), number)
        elif key := _KEY.match(line):
            names = [*table, *_names(key[1])]
            lines.setdefault(".".join(names), number)
            for size in range(len(table) + 1, len(names)):
                lines.setdefault(".".join(names[:size]), number)
    return lines


def _blank(match: re.Match[str]) -> str:
    """Strings of several lines become ends of lines, comments nothing; others stay."""
    if match[1]:
        return "\n" * match[0].count("\n")
    return "" if match[2] else match[0]


def _names(dotted: str) -> list[str]:
    return [name.strip("\"'") for name in _NAME.findall(dotted)]


def _not_toml(text: str, message: str) -> DraftProblem:
    where = _AT_LINE.search(message)
    line = int(where[1]) if where else text.count("\n") + 1 if _AT_END.search(message) else 0
    rule = _AT_END.sub("", _AT_LINE.sub("", message)).strip()
    fix = "strings stand in quotes, tables in [brackets]"
    return DraftProblem(line=line, key="TOML", value="", rule=rule, fix=fix)
