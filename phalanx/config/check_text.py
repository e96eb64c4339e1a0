"""Refuses texts that no folder, log or terminal can carry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from phalanx.config.errors import Problem, problem, written
from phalanx.config.schema import Job

# File systems take 255 bytes; temporary names beside a run's folder need some of them.
MOST_NAME_BYTES = 200


def text_problems(job: Job) -> Iterator[Problem]:
    """Rules for the run's name, and for every setting that is text."""
    yield from _unprintable(msgspec.to_builtins(job), "")
    name = job.name
    if not name or "/" in name or name.startswith("."):
        yield problem(
            "name",
            written(name),
            "must be a folder's name: not empty, no slash, no leading dot",
            f'nearest: "{name.replace("/", "-").lstrip(".") or "run"}"',
        )
    if len(name.encode(errors="replace")) > MOST_NAME_BYTES:
        short = name.encode(errors="replace")[:32].decode(errors="ignore")
        rule = f"must take at most {MOST_NAME_BYTES} bytes, since it names a folder"
        yield problem("name", written(f"{short}..."), rule, f'e.g. "{short}"')


def _unprintable(value: Any, key: str) -> Iterator[Problem]:
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from _unprintable(below, f"{key}.{name}" if key else name)
    elif isinstance(value, str) and any(map(_unwelcome, value)):
        plain = "".join(char for char in value if not _unwelcome(char)).strip()
        quoted = value.encode("unicode_escape").decode()
        rule = "must be text without control characters"
        yield problem(key, f'"{quoted}"', rule, f'nearest: "{plain}"')


def _unwelcome(char: str) -> bool:
    # A lone surrogate is a byte of the command line that was no UTF-8.
    return char < " " or char == "\x7f" or "\ud800" <= char <= "\udfff"
