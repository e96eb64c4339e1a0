"""What the end of a program's output says of why it ended: its exception, else its last lines."""

from __future__ import annotations

import re
from pathlib import PurePath

from phalanx.control.host.plain_text import one_line

LAST_LINES = 3
LINE_CHARS = 200
TOLD_CHARS = 500

TRACEBACK = "Traceback (most recent call last):"
FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')
EXCEPTION = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?::\s|$)")
# Launchers and torch put a rank or a time before each line of theirs.
PREFIX = re.compile(r"^(?:\[[^\]]{1,40}\]:? ?)+")


def described_end(output: str) -> str:
    """One line for people; "" where there is no output."""
    lines = [PREFIX.sub("", one_line(line)) for line in re.split(r"[\r\n]+", output)]
    return (_exception(lines) or _last(lines))[:TOLD_CHARS]


def _exception(lines: list[str]) -> str:
    """The last exception that a traceback ends in, and where it was raised."""
    frame: re.Match[str] | None = None
    inside, last = False, ""
    for line in lines:
        if line.strip() == TRACEBACK:
            inside, frame = True, None
        elif inside and (match := FRAME.match(line)):
            frame = match
        elif inside and not line.startswith(" ") and EXCEPTION.match(line):
            inside = False
            place = f" ({PurePath(frame['file']).name}:{frame['line']})" if frame else ""
            last = f"{line.strip()[:LINE_CHARS]}{place}"
    return last


def _last(lines: list[str]) -> str:
    kept = [line.strip()[:LINE_CHARS] for line in lines if line.strip()]
    return " | ".join(kept[-LAST_LINES:])
