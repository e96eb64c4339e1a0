"""A job file with some settings changed: comments and order stay."""

from __future__ import annotations

import re
from collections.abc import Mapping

from phalanx.config import ConfigError, Job, job_from_table, to_toml
from phalanx.config.errors import written
from phalanx.config.toml_text import parse_toml
from phalanx.plan.tune.settings import ENVIRONMENT, UNSET, Value


def tuned_text(text: str, changes: Mapping[str, Value], wanted: Job, comments: list[str]) -> str:
    """The text with changes, or where that would not be ``wanted`` all settings of it."""
    head = "".join(f"# {comment}\n" for comment in comments)
    edited = text
    for key, value in changes.items():
        edited = _with_setting(edited, key, value)
    try:
        same = job_from_table(parse_toml(edited)) == wanted
    except (ConfigError, ValueError):
        same = False
    return head + (edited if same else to_toml(wanted))


def _with_setting(text: str, key: str, value: Value) -> str:
    table, _, name = key.rpartition(".")
    lines = text.splitlines()
    start = next((at for at, line in enumerate(lines) if _heading(line) == table), None)
    setting = f"{name} = {written(value)}"
    unset = key.startswith(ENVIRONMENT) and value == UNSET
    if start is None:
        return text if unset else text.rstrip("\n") + f"\n\n[{table}]\n{setting}\n"
    rest = range(start + 1, len(lines))
    end = next((at for at in rest if _heading(lines[at]) is not None), len(lines))
    at = next((at for at in range(start + 1, end) if re.match(rf"\s*{name}\s*=", lines[at])), None)
    if at is not None:
        lines[at : at + 1] = [] if unset else [setting]
    elif not unset:
        lines.insert(start + 1, setting)
    return "\n".join(lines) + "\n"


def _heading(line: str) -> str | None:
    """The table that a line begins, or None."""
    found = re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]", line)
    return found[1] if found else None
