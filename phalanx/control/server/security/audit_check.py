"""Reads the audit log, and proves that no line of it was changed, left out or cut off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx.control.server.security.audit import (
    ANCHOR,
    NAME,
    START,
    AuditEntry,
    hash_of,
    older_files,
    read_anchor,
)


class AuditVerdict(Struct, frozen=True, kw_only=True):
    """Whether the chain holds. ``broken``: number of the first line that does not follow."""

    lines: int
    first: int = 0
    last: int = 0
    head: str = ""  # hash of the last line
    broken: int = 0  # 0: none
    problem: str = ""


def lines_of(state: Path) -> Iterator[tuple[Path, bytes]]:
    """Every line with its file, oldest first."""
    path = state / NAME
    for file in [*older_files(path), path]:
        if file.exists():
            with file.open("rb") as opened:
                for line in opened:
                    yield file, line


def entries(state: Path) -> Iterator[AuditEntry]:
    """Every entry that can be read, oldest first."""
    for _, line in lines_of(state):
        try:
            yield msgspec.json.decode(line, type=AuditEntry)
        except msgspec.MsgspecError:
            continue


def verify(state: Path, head: str = "") -> AuditVerdict:
    """Follows the chain through all files; ``head``: a hash of a line that must be there."""
    anchor = read_anchor(state / ANCHOR)
    expected, number, count, first = START, anchor.first if anchor else 1, 0, 0
    hashes_head = not head
    for file, line in lines_of(state):
        try:
            entry = msgspec.json.decode(line, type=AuditEntry)
        except msgspec.MsgspecError as error:
            return _broken(count, first, number, f"{file.name}: line cannot be read: {error}")
        begins = not count
        if entry.number != number:
            what = f"{file.name}: line {entry.number} stands where {number} should"
            return _broken(count, first, number, what)
        if entry.before != expected and not (begins and number > 1):
            what = (
                f"{file.name}: line {number} does not follow the one before it, which was changed"
            )
            return _broken(count, first, max(1, number - 1), what)
        first = first or number
        expected, number, count = hash_of(line), number + 1, count + 1
        hashes_head = hashes_head or expected == head
        if anchor is not None and entry.number == anchor.number and expected != anchor.hash:
            return _broken(
                count, first, entry.number, f"line {entry.number} is not the one written"
            )
    if anchor is None and count:
        return _broken(count, first, 0, f"{ANCHOR} is missing: nobody can say which line is last")
    if anchor is not None and number <= anchor.number:
        return _broken(count, first, number, f"lines {number} to {anchor.number} are missing")
    if not hashes_head:
        return _broken(count, first, number, f"no line has the hash {head}")
    return AuditVerdict(lines=count, first=first, last=number - 1, head=expected)


def _broken(count: int, first: int, number: int, problem: str) -> AuditVerdict:
    return AuditVerdict(lines=count, first=first, broken=number, problem=problem)
