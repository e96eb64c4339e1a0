"""Old events leave the log for compressed files, once no restart can need them.

A restart begins at a snapshot; what lies before the older of the two that are kept is history. It
is written to ``archive/events-FIRST-LAST.jsonl.gz`` and synced before it is dropped, so that a kill
in between leaves it in both places and never in none.
"""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import msgspec

from phalanx.control.server.store.interface import (
    EventStore,
    Row,
    UnreadableError,
    commands_of,
    event_of,
)

PAGE = 5_000


def archive_events(store: EventStore, folder: Path, before_ns: int) -> int:
    """Archive events older than a time; returns how many. Called by whoever leads."""
    floor, archived = store.oldest_snapshot(), 0
    after = 0
    while True:
        rows = [row for row in store.events(after, PAGE) if row[0] <= floor and row[1] < before_ns]
        if not rows:
            return archived
        first, last = rows[0][0], rows[-1][0]
        commands = dict(store.commands(range(first, last + 1)))
        lines = []
        for row in rows:
            given = commands_of((row[0], commands[row[0]])) if row[0] in commands else []
            entry = {"sequence": row[0], "time_ns": row[1], "body": _body(row), "commands": given}
            lines.append(msgspec.json.encode(entry))
        _write(folder / f"events-{first:012d}-{last:012d}.jsonl.gz", b"\n".join(lines) + b"\n")
        store.drop_events(last)
        archived += len(rows)
        after = last


def _body(row: Row) -> object:
    """What an event says; its bytes where they make no sense any more."""
    try:
        return event_of(row).body
    except UnreadableError:
        return {"kind": "Unreadable", "bytes": row[2]}


def _write(path: Path, text: bytes) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.touch(mode=0o600)
    with draft.open("wb") as file:
        file.write(gzip.compress(text, 6))
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
