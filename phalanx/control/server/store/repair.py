"""What a person may do with a damaged log, and what each way would lose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec
from msgspec import Struct

from phalanx import __version__
from phalanx.cluster.protocol.commands import Accept
from phalanx.cluster.protocol.events import Submit, SubmitWorkflow
from phalanx.control.server.store.check import Damage, ExaminedLog
from phalanx.control.server.store.interface import (
    RECORDS_A_PAGE,
    StoreError,
    UnreadableError,
    commands_of,
    event_of,
)
from phalanx.control.server.store.sqlite import SqliteStore
from phalanx.control.server.store.takeover import SqlStore

REPAIRER = "phalanx server repair"


class RepairLoss(Struct, frozen=True):
    """What goes with some events."""

    events: int
    unreadable: int  # of them: nobody knows what they were
    kinds: dict[str, int]
    jobs: tuple[str, ...]  # names of jobs that were submitted by them

    def __str__(self) -> str:
        if not self.events:
            return "no event"
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
        text = f"{self.events} events"
        text += f" ({kinds})" if kinds else ""
        text += f", {self.unreadable} of them unreadable" if self.unreadable else ""
        return text + (f"; jobs that go with them: {', '.join(self.jobs)}" if self.jobs else "")


def loss_of(store: SqlStore, first: int, last: int) -> RepairLoss:
    """What some events say, as far as they can still be read."""
    kinds: Counter[str] = Counter()
    jobs: list[str] = []
    seen = 0
    for body in _bodies(store, first, last):
        seen += 1
        kinds[type(body).__name__] += 1
        if isinstance(body, Submit):
            jobs.append(body.spec.name)
        if isinstance(body, SubmitWorkflow):
            jobs += [step.spec.name for step in body.steps]
    events = max(0, last - first + 1)
    return RepairLoss(events, events - seen, dict(kinds.most_common()), tuple(jobs))


def _bodies(store: SqlStore, first: int, last: int) -> Iterator[object]:
    after = first - 1
    while after < last:
        records = [
            each for each in store.records(after, RECORDS_A_PAGE) if after < each.sequence <= last
        ]
        if not records:
            return
        for record in records:
            try:
                yield event_of((record.sequence, record.time_ns, record.body)).body
            except UnreadableError:
                continue
        after = records[-1].sequence


def lone_events(examined: ExaminedLog) -> list[int]:
    """Damaged events that can be set aside one by one; []: something else is wrong, too."""
    if any(each.damage is not Damage.EVENT for each in examined.findings):
        return []
    return [each.first for each in examined.findings]


def truncate(store: SqlStore, after: int) -> str:
    """Give up everything behind an event; returns where the files as they were are kept."""
    examined = store.examined()
    if not 0 <= after <= examined.sound:
        raise StoreError(
            f"the log is sound up to event {examined.sound}:"
            " it can be cut behind that one, or before"
        )
    if after < examined.sequence and after < _first_start(store):
        raise StoreError(f"no snapshot is as old as event {after}: restore a backup")
    kept = _lead(store)
    store.truncate(after, f"cut by a person; it was acknowledged up to {examined.acknowledged}")
    return kept


def set_aside(store: SqlStore, sequences: list[int]) -> str:
    """Have damaged events count as ticks; returns where the files as they were are kept."""
    found = store.examined()
    if wrong := sorted(set(sequences) - set(lone_events(found))):
        raise StoreError(
            f"event {wrong[0]} cannot be set aside: only damaged ones can, where nothing else is "
            "wrong with the log"
        )
    for sequence in sequences:
        if job := job_made_by(store, sequence):
            raise StoreError(
                f"event {sequence} submitted job {job}: without it later jobs would have other "
                "numbers, and what happened to them would happen to others; restore a backup or "
                "use --truncate-after"
            )
    kept = _lead(store)
    for sequence in sequences:
        store.set_aside(sequence, "damaged", _time_near(store, sequence))
    return kept


def job_made_by(store: SqlStore, sequence: int) -> int:
    """The first job that an event made, by the commands that it gave; 0: none."""
    bodies = (each.body for row in store.commands([sequence]) for each in commands_of(row))
    return next((body.job for body in bodies if isinstance(body, Accept) and body.job), 0)


def _time_near(store: SqlStore, sequence: int) -> int:
    """When an event happened that is damaged: its own time may be wrong, too."""
    before, behind = store.records(sequence - 2, 1), store.records(sequence, 1)
    return min(
        (each.time_ns for each in (*before, *behind) if each.sequence != sequence), default=0
    )


def _first_start(store: SqlStore) -> int:
    """The earliest event that a replay can begin behind."""
    records = store.records(0, 1)
    starts = [each.sequence for each in store.snapshots()]
    return 0 if records and records[0].sequence == 1 else min(starts, default=0)


def _lead(store: SqlStore) -> str:
    kept = str(store.copy_apart()) if isinstance(store, SqliteStore) else ""
    store.lead(REPAIRER, __version__, damaged_too=True)
    return kept


def as_json(examined: ExaminedLog) -> bytes:
    """What was found, for programs."""
    body = {
        "sound_until": examined.sound,
        "acknowledged_until": examined.acknowledged,
        "findings": [str(each) for each in examined.findings],
    }
    return msgspec.json.encode(body)
