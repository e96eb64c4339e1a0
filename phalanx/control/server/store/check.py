"""Whether a log holds all that was acknowledged, and where it does not."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from phalanx.control.server.store.anchor import AnchorMark
from phalanx.control.server.store.chain import START, StoredEvent, follows
from phalanx.control.server.store.interface import RECORDS_A_PAGE, StoreDamagedError, StoredSnapshot

MOST_FINDINGS = 1_000


class Damage(StrEnum):
    """What is wrong with a log."""

    EVENT = "event"
    MISSING = "missing"
    END = "end"
    OTHER = "other"
    SNAPSHOTS = "snapshots"
    EPOCH = "epoch"
    KEYS = "keys"
    NO_ANCHOR = "no anchor"
    BAD_ANCHOR = "bad anchor"


_SENTENCES = {
    Damage.EVENT: "event {first} is damaged: its checksum differs",
    Damage.MISSING: "events {first} to {last} are missing",
    Damage.END: "events {first} to {last} were acknowledged and are missing at the end",
    Damage.OTHER: "event {first} is not the one that was acknowledged: this is another log, or "
    "an old copy of it that went on",
    Damage.SNAPSHOTS: "no snapshot can be used, and the events before {last} are in the archive",
    Damage.EPOCH: "the term of a leader is missing (epoch {last}): what it wrote last is gone",
    Damage.KEYS: "tokens or secrets are missing or damaged",
    Damage.NO_ANCHOR: "nothing says how far it was acknowledged: its anchor file is missing, as "
    "it is beside a restored backup",
    Damage.BAD_ANCHOR: "its anchor file, which says how far it was acknowledged, is damaged",
}


class LogFinding(Struct, frozen=True):
    """One damage; ``first`` and ``last`` are events, or an epoch."""

    damage: Damage
    first: int = 0
    last: int = 0

    def __str__(self) -> str:
        return _SENTENCES[self.damage].format(first=self.first, last=self.last)


class LogKeys(Struct, frozen=True):
    """Tokens and secrets of a log."""

    checksum: bytes  # of those that are whole
    damaged: tuple[str, ...]  # names of the others


class Repair(Struct, frozen=True):
    """A log was cut by a person: marks of earlier leaders beyond it hold no more."""

    epoch: int
    after: int


class ReadableLog(Protocol):
    """What is read of a log to judge it; nothing is written."""

    def records(self, after: int, limit: int) -> list[StoredEvent]:
        """Events as they are stored."""

    def snapshots(self) -> list[StoredSnapshot]:
        """Those that are whole, newest first."""

    def last_epoch(self) -> int:
        """Of the last leader; 0: it never had one."""

    def keys(self) -> LogKeys:
        """Tokens and secrets."""

    def repairs(self) -> list[Repair]:
        """Cuts that were made on purpose."""


class ExaminedLog(Struct):
    """A log as it was found."""

    sequence: int = 0  # the last event that is there, sound or not
    chain: bytes = START  # its checksum
    sound: int = 0  # the last event with nothing wrong before it
    findings: list[LogFinding] = []
    mark: AnchorMark | None = None
    keys: LogKeys = LogKeys(START, ())
    epoch: int = 0
    damaged_snapshots: list[int] = []  # no loss as long as there is another

    @property
    def acknowledged(self) -> int:
        """The last event that somebody was told of, as far as is known."""
        return max(self.sequence, self.mark.sequence if self.mark is not None else 0)


def examine(
    log: ReadableLog, mark: AnchorMark | None, *, anchored: bool = True, bad_anchor: bool = False
) -> ExaminedLog:
    """Follows the chain from the newest whole snapshot to the mark.

    A log that is ``anchored`` must have a mark: all who led it left one.
    """
    examined = ExaminedLog(mark=mark, keys=log.keys(), epoch=log.last_epoch())
    links = _walk(log, examined)
    if examined.keys.damaged:
        examined.findings.append(LogFinding(Damage.KEYS))
    if bad_anchor:
        examined.findings.append(LogFinding(Damage.BAD_ANCHOR))
    elif mark is None:
        if anchored and (examined.epoch or examined.sequence):
            examined.findings.append(LogFinding(Damage.NO_ANCHOR))
    else:
        _compare(log, examined, mark, links)
    return examined


def _walk(log: ReadableLog, examined: ExaminedLog) -> dict[int, bytes]:
    """Every event behind the newest whole snapshot; returns their checksums."""
    start = next(iter(log.snapshots()), None)
    if start is not None:
        examined.sequence, examined.chain = start.sequence, start.chain
    links = {examined.sequence: examined.chain}
    while records := log.records(examined.sequence, RECORDS_A_PAGE):
        for record in records:
            first = examined.sequence + 1
            if record.sequence < first:  # in no order at all: it would be read for ever
                raise StoreDamagedError(f"event {record.sequence} stands behind {first - 1}")
            if record.sequence != first:
                gap = Damage.SNAPSHOTS if start is None and first == 1 else Damage.MISSING
                _note(examined, LogFinding(gap, first, record.sequence - 1))
            elif not follows(examined.chain, record):
                _note(examined, LogFinding(Damage.EVENT, record.sequence, record.sequence))
            examined.sequence, examined.chain = record.sequence, record.chain
            links[record.sequence] = record.chain
    if not examined.findings:
        examined.sound = examined.sequence
    return links


def _note(examined: ExaminedLog, finding: LogFinding) -> None:
    if not examined.findings:
        examined.sound = finding.first - 1
    if len(examined.findings) < MOST_FINDINGS:
        examined.findings.append(finding)


def _compare(
    log: ReadableLog, examined: ExaminedLog, mark: AnchorMark, links: dict[int, bytes]
) -> None:
    if any(r.epoch > mark.epoch and mark.sequence > r.after for r in log.repairs()):
        return  # what it speaks of was given up on purpose
    if examined.epoch < mark.epoch:
        examined.findings.append(LogFinding(Damage.EPOCH, mark.epoch, mark.epoch))
    if mark.sequence > examined.sequence:
        _note(examined, LogFinding(Damage.END, examined.sequence + 1, mark.sequence))
    elif _link_at(log, mark.sequence, links) not in (None, mark.chain):
        examined.findings.append(LogFinding(Damage.OTHER, mark.sequence, mark.sequence))
    own = examined.epoch == mark.epoch  # otherwise another server wrote keys behind it
    if (
        own
        and not examined.keys.damaged
        and examined.keys.checksum not in (mark.keys, mark.next_keys)
    ):
        examined.findings.append(LogFinding(Damage.KEYS))


def _link_at(log: ReadableLog, sequence: int, links: dict[int, bytes]) -> bytes | None:
    """An event's checksum; None where it has left the log."""
    if sequence in links:
        return links[sequence]
    records = log.records(sequence - 1, 1)
    return records[0].chain if records and records[0].sequence == sequence else None
