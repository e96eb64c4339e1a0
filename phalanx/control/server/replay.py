"""From the store to a running core: the newest snapshot, and the events behind it."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx import __version__
from phalanx.cluster.core import Core, SnapshotError, VersionError
from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.ledger.report import report
from phalanx.cluster.policy import Policy
from phalanx.cluster.protocol.events import ControllerStarted
from phalanx.control.server.shell_memory import ShellMemory
from phalanx.control.server.store.chain import START
from phalanx.control.server.store.interface import (
    RECORDS_A_PAGE,
    EventStore,
    Row,
    StoreDamagedError,
    StoreError,
    StoreFormatError,
    UnreadableError,
    command_row,
    event_of,
    open_store,
    tail,
)

logger = logging.getLogger("phalanx.server")


class Recovered(Struct):
    """A core as it was when the last event was stored."""

    core: Core
    memory: ShellMemory
    chain: bytes = START  # checksum of the event that the replay begins behind
    replayed: int = 0  # events behind the snapshot
    diverged: int = 0  # first event whose commands differ from those that were sent; 0: none
    aside: list[str] = []  # what was set aside on the way, in words
    unusable: list[int] = []  # snapshots that could not be used


class UndigestedError(Exception):
    """The core failed on an event."""

    def __init__(self, sequence: int, why: str) -> None:
        super().__init__(why)
        self.sequence = sequence


def recover(store: EventStore, policy: Policy) -> Recovered:
    """Loads a snapshot and replays the tail; a store without a log gives an empty fleet.

    The newest snapshot that can be used is taken. One event must not keep a fleet without its
    controller for good: what makes no sense is set aside, and said.
    """
    aside: list[str] = []
    while True:
        try:
            recovered = _replay(store, _begin(store, policy))
        except (UnreadableError, UndigestedError) as error:
            logger.error("event %d is set aside: %s", error.sequence, error)
            store.set_aside(error.sequence, str(error))
            aside.append(f"event {error.sequence} was set aside: {error}")
        else:
            recovered.aside = aside
            return recovered


def _replay(store: EventStore, recovered: Recovered) -> Recovered:
    core, sent = recovered.core, StoredCommands(store)
    for event in tail(store, core.sequence, recovered.chain):
        try:
            commands = core.handle(event)
            recovered.memory.note(event, commands)
            recorded = command_row(0, commands)[1]
        except Exception as error:
            logger.exception("event %d cannot be digested", event.sequence)
            raise UndigestedError(event.sequence, repr(error)) from error
        recovered.replayed += 1
        if not recovered.diverged and sent.differs(event.sequence, recorded):
            recovered.diverged = event.sequence
    if recovered.diverged:
        # The fleet was told something else than the core now believes; agents report what they
        # run when they connect, which brings both together again.
        logger.error("event %d replays differently: report this as a bug", recovered.diverged)
    return recovered


def _begin(store: EventStore, policy: Policy) -> Recovered:
    """The newest snapshot that can be used, or an empty fleet where all events are there."""
    unusable = []
    for snapshot in store.snapshots():
        try:
            core, memory = Core.restore(snapshot.core), ShellMemory.load(snapshot.answers)
        except VersionError as error:
            raise StoreFormatError(
                f"the log was written by phalanx {snapshot.version}, this is phalanx "
                f"{__version__}: {error}"
            ) from None
        except Exception as error:  # of whatever kind: there is one before it, or the events
            known = isinstance(error, SnapshotError | msgspec.MsgspecError)
            text = "the snapshot at event %d cannot be used: %s"
            logger.error(text, snapshot.sequence, error, exc_info=None if known else error)
            unusable.append(snapshot.sequence)
            continue
        if unusable:
            logger.error("the snapshot at event %d is used instead", snapshot.sequence)
        return Recovered(core, memory, chain=snapshot.chain, unusable=unusable)
    rows = store.events(0, 1)
    if unusable and (not rows or rows[0][0] != 1):
        raise StoreDamagedError(
            "no snapshot can be used, and the events before them are in the archive: restore a "
            "backup, or start the version that wrote the log"
        )
    return Recovered(Core(Fleet(), _first_policy(rows) or policy), ShellMemory(), unusable=unusable)


def _first_policy(rows: list[Row]) -> Policy | None:
    """The policy that a log begins with, where its first event says so."""
    try:
        first = event_of(rows[0]).body if rows else None
    except UnreadableError:
        return None
    return first.policy if isinstance(first, ControllerStarted) else None


class StoredCommands:
    """The commands that were stored with the log, read a page at a time."""

    def __init__(self, store: EventStore) -> None:
        self._store = store
        self._rows: dict[int, bytes] = {}
        self._until = 0

    def differs(self, sequence: int, commands: bytes) -> bool:
        """Whether an event gave other commands when it was first handled."""
        if sequence >= self._until:
            self._until = sequence + RECORDS_A_PAGE
            self._rows = dict(self._store.commands(range(sequence, self._until)))
        recorded = self._rows.get(sequence)
        return recorded is not None and recorded != commands


def stored_buckets(state: Path) -> dict[str, int]:
    """GPU-nanoseconds of the first job by bucket, as of the last event in a state folder's log."""
    if not (state / "log.sqlite").exists():
        raise StoreError(f"{state} holds no log of a controller")
    store = open_store("", state)
    try:
        core = recover(store, Policy()).core
    finally:
        store.close()
    shares = report(core.ledger, core.view.policy.price).jobs
    if 1 not in shares:
        raise StoreError(f"the log in {state} knows no job 1")
    return dict(shares[1].buckets)
