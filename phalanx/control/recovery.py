"""From the store to a running core: the newest snapshot, and the events behind it."""

from __future__ import annotations

import logging

from msgspec import Struct

from phalanx.cluster.core import VERSION, Core, VersionError
from phalanx.cluster.events import Event, Tick
from phalanx.cluster.fleet import Fleet
from phalanx.cluster.policy import Policy
from phalanx.control.memory import Memory
from phalanx.control.store import Snapshot, Store, StoreError, command_row, event_row, tail

logger = logging.getLogger("phalanx.server")


class Recovered(Struct):
    """A core as it was when the last event was stored."""

    core: Core
    memory: Memory
    replayed: int  # events behind the snapshot
    diverged: int  # first event whose commands differ from those that were sent; 0: none


def recover(store: Store, policy: Policy) -> Recovered:
    """Loads the snapshot and replays the tail; a store without a log gives an empty fleet."""
    snapshot = store.last_snapshot()
    if snapshot is None:
        core, memory = Core(Fleet(), policy), Memory()
    else:
        core, memory = _load(snapshot), Memory.load(snapshot.answers)
    found = Recovered(core, memory, 0, 0)
    sent = Sent(store)
    for event in tail(store, core.sequence):
        try:
            commands = core.handle(event)
        except Exception as error:
            # One event must not keep a fleet without its controller for good.
            logger.exception("event %d cannot be digested and is set aside", event.sequence)
            quiet = event_row(Event(event.sequence, event.time_ns, Tick()))
            store.set_aside(event.sequence, quiet[2], repr(error))
            return recover(store, policy)
        memory.note(event, commands)
        found.replayed += 1
        if not found.diverged and sent.differs(event.sequence, command_row(0, commands)[1]):
            found.diverged = event.sequence
    if found.diverged:
        # The fleet was told something else than the core now believes; agents report what they
        # run when they connect, which brings both together again.
        logger.error("event %d replays differently: report this as a bug", found.diverged)
    return found


class Sent:
    """The commands that were stored with the log, read a page at a time."""

    def __init__(self, store: Store, page: int = 2_000) -> None:
        self._store, self._page = store, page
        self._rows: dict[int, bytes] = {}
        self._until = 0

    def differs(self, sequence: int, commands: bytes) -> bool:
        """Whether an event gave other commands when it was first handled."""
        if sequence >= self._until:
            self._until = sequence + self._page
            self._rows = dict(self._store.commands(range(sequence, self._until)))
        recorded = self._rows.get(sequence)
        return recorded is not None and recorded != commands


def _load(snapshot: Snapshot) -> Core:
    try:
        return Core.restore(snapshot.core)
    except VersionError as error:
        raise StoreError(
            f"the log was written by phalanx {snapshot.version} and its snapshot cannot be read "
            f"by this version (core {VERSION}): {error}; start the old version once and stop it"
        ) from None
