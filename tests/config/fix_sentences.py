"""What the sentences of fixes ask for, as settings that can be applied and checked again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from phalanx.config import ConfigError, ConfigProblem, check, job_from_table

Settings = dict[str, Any]  # a job's table with dotted keys; "world size" is the number of ranks
VALUE = r'("[^"]*"|[-\w.]+)'
KEY = r"((?:train|model|parallel|data|memory|precision|checkpoint|optimizer)\.[\w.\[\]]+)"


def problems_of(settings: Settings) -> list[ConfigProblem]:
    table: dict[str, Any] = {}
    for key, value in settings.items():
        if key == "world size":
            continue
        *above, name = key.split(".")
        at = table
        for section in above:
            at = at.setdefault(section, {})
        at[name] = value
    try:
        check(job_from_table(table), settings["world size"])
    except ConfigError as error:
        return list(error.problems)
    return []


def alternatives(found: ConfigProblem, settings: Settings) -> Iterator[Settings]:
    """The settings after each of the fixes that a problem names; none may be left unread."""
    for text in found.fix.split(", or "):
        changed = dict(settings)
        for part in re.split(r" and | with ", text):
            _apply(part, found.key, changed)
        yield changed


def _apply(text: str, key: str, settings: Settings) -> None:
    if match := re.fullmatch(rf"(?:nearest:|set it to) {VALUE}", text):
        settings[key] = _value(match[1])
    elif match := re.fullmatch(rf"(?:set |pad )?{KEY} (?:=|to) {VALUE}", text):
        settings[match[1]] = _value(match[2])
    elif match := re.fullmatch(r"start (\d+) ranks", text):
        settings["world size"] = int(match[1])
    elif text == "leave it out":
        settings.pop(key)
    else:
        raise AssertionError(f"{key}: nobody can tell what to do by {text!r}")


def _value(text: str) -> Any:
    if text.startswith('"'):
        return text[1:-1]
    if text in ("true", "false"):
        return text == "true"
    return float(text) if "." in text else int(text)
