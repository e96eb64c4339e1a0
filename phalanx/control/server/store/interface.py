"""The event log and its snapshots: what a server must not lose.

``EventStore`` is what the controller needs; SQLite and PostgreSQL give it. Its methods block and
are called from one thread of their own, so that an fsync never holds up a socket.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from phalanx.cluster.protocol.commands import Command
from phalanx.cluster.protocol.events import Event, EventBody, Tick
from phalanx.control.server.store.chain import StoredEvent, follows

_encode = msgspec.msgpack.Encoder().encode
_decode_body = msgspec.msgpack.Decoder(EventBody).decode
_decode_commands = msgspec.msgpack.Decoder(list[Command]).decode
TICK = _encode(Tick())
RECORDS_A_PAGE = 1_000  # held at once: a restart must not need more memory behind a longer log


class StoreError(Exception):
    """The store could not do its work: full disk, damaged file, lost connection."""


class StoreUnusableError(StoreError):
    """Nothing that waiting would mend: a person must decide."""


class StoreDamagedError(StoreUnusableError):
    """The log does not hold what was acknowledged, or cannot be read."""


class StoreFormatError(StoreUnusableError):
    """The log was written by a version that this one cannot follow."""


class UnreadableError(StoreError):
    """An event that is stored as it was written, and makes no sense."""

    def __init__(self, sequence: int, why: str) -> None:
        super().__init__(f"event {sequence} cannot be read: {why}")
        self.sequence = sequence


class StoreLostError(StoreError):
    """Another server has taken over: this one must not write any more."""


class StoreBusyError(StoreError):
    """Another server leads on this store."""

    def __init__(self, message: str, leader: str = "") -> None:
        super().__init__(message)
        self.leader = leader  # its URL


class StoredSnapshot(Struct, frozen=True, kw_only=True):
    """A state of the core, and the shell's memory of what it answered to whom."""

    sequence: int
    version: str  # of the package that wrote it
    core: bytes
    answers: bytes
    chain: bytes = b""  # checksum of its last event; the store knows it


class Leadership(Struct, frozen=True, kw_only=True):
    """Leadership that was just taken."""

    epoch: int
    version_before: str  # of the package of the leader before; "": there was none


Row = tuple[int, int, bytes]  # sequence, time_ns, body
CommandRow = tuple[int, bytes]  # sequence, its commands
SECRET_BYTES = 32
LITTLE_BYTES = 1 << 20  # left on a disk: it counts as full


class EventStore(Protocol):
    """A log with one writer at a time."""

    def lead(self, url: str, version: str, *, damaged_too: bool = False) -> Leadership:
        """Become the one writer, with a new epoch; StoreBusyError when there is another.

        StoreUnusableError where the log is newer than this version, or damaged (unless it is led
        in order to repair it): nothing is written then.
        """

    def renew(self) -> None:
        """Say that the leader is well; StoreLostError when it no longer is the leader."""

    def append(self, events: Sequence[Row], commands: Sequence[CommandRow]) -> None:
        """Store events (all or none, durably), and commands that earlier events gave."""

    def set_aside(self, sequence: int, why: str) -> None:
        """Have an event count as a tick from now on, since it cannot be read or digested."""

    def save_snapshot(self, snapshot: StoredSnapshot) -> None:
        """Keep a snapshot; older ones than the last two go."""

    def snapshots(self) -> list[StoredSnapshot]:
        """Those that are whole, newest first."""

    def drop_snapshot(self, sequence: int) -> None:
        """Forget one that is of no use."""

    def oldest_snapshot(self) -> int:
        """The sequence of the oldest snapshot that is kept; 0: there is none."""

    def drop_events(self, until: int) -> None:
        """Forget events up to a sequence, and what they gave; never what a snapshot needs."""

    def events(self, after: int, limit: int) -> list[Row]:
        """Events behind a sequence, oldest first; ticks for those that were set aside."""

    def records(self, after: int, limit: int) -> list[StoredEvent]:
        """The same with their checksums, as they are stored."""

    def commands(self, sequences: Sequence[int]) -> list[CommandRow]:
        """What some events gave, as far as it was stored."""

    def tokens(self) -> list[tuple[str, bytes]]:
        """Every token's id and record."""

    def put_tokens(self, records: Mapping[str, bytes]) -> None:
        """Keep records of tokens by their ids: all of them, or none."""

    def drop_token(self, token: str) -> None:
        """Forget a token."""

    def secret(self, name: str) -> bytes:
        """Random bytes that are made when they are first asked for, and stay; for the leader."""

    def close(self) -> None:
        """Give up leadership and let go of everything."""


def event_row(event: Event) -> Row:
    """An event as it is stored."""
    return event.sequence, event.time_ns, _encode(event.body)


def event_of(row: Row) -> Event:
    """The event in a row; UnreadableError where there is none that this version knows."""
    sequence, time_ns, body = row
    try:
        return Event(sequence, time_ns, _decode_body(body))
    except msgspec.MsgspecError as error:
        raise UnreadableError(sequence, str(error)) from None


def command_row(sequence: int, commands: Sequence[Command]) -> CommandRow:
    """The commands of an event as they are stored."""
    return sequence, _encode(commands)


def commands_of(row: CommandRow) -> list[Command]:
    """The commands in a row."""
    return _decode_commands(row[1])


def tail(
    store: EventStore, after: int, chain: bytes, page: int = RECORDS_A_PAGE
) -> Iterator[Event]:
    """Every event behind one with this checksum; StoreDamagedError where the chain breaks."""
    while records := store.records(after, page):
        for record in records:
            if record.sequence != after + 1:
                raise StoreDamagedError(f"the log jumps from event {after} to {record.sequence}")
            if not follows(chain, record):
                raise StoreDamagedError(f"event {record.sequence} is damaged: its checksum differs")
            after, chain = record.sequence, record.chain
            yield event_of((record.sequence, record.time_ns, body_of(record)))


def body_of(record: StoredEvent) -> bytes:
    """What a record counts as."""
    return TICK if record.aside else record.body


def open_store(where: str, folder: Path) -> EventStore:
    """The store that ``--store`` names: "" for SQLite in the folder, or a PostgreSQL URL."""
    if not where:
        from phalanx.control.server.store.sqlite import SqliteStore

        return SqliteStore(folder / "log.sqlite")
    if where.startswith(("postgresql://", "postgres://")):
        try:
            from phalanx.control.server.store.postgres import PostgresStore
        except ImportError:
            raise StoreError(
                "PostgreSQL needs the package psycopg: pip install 'phalanx[postgres]'"
            ) from None
        return PostgresStore(where, folder / "postgres.anchor")
    raise StoreError(f"{where!r} is no store: leave it out for SQLite, or give postgresql://…")


def full_disk_advice(folder: Path) -> str:
    """What a full disk needs, to be said behind an error; databases call it by several names."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    return "" if free > LITTLE_BYTES else f"; the disk is full: make room in {folder}"


def sequences(rows: Iterable[Row]) -> str:
    """Which events these are, for an error message."""
    numbers = [row[0] for row in rows]
    return f"events {numbers[0]} to {numbers[-1]}" if numbers else "no events"
