"""Connections of callers that have not shown a token: how many there may be, and for how long.

Whoever has business here shows a token within moments. So of too many that have not, the one that
has been there for longest goes: a flood of idle or slow ones keeps nobody else out.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

LEAST_UNKNOWN = 4_096  # connections without a token that there may always be, in all
MOST_UNKNOWN = 16_384  # where there are files enough: who is sent away only comes again
GRACE_SECONDS = 3.0  # nobody goes before: a whole fleet connects at once after a restart
HARD_FACTOR = 8  # beyond so many times the bound a new one goes at once


class AnonymousConnection(Protocol):
    """A connection that may be told to go."""

    def dismiss(self) -> None:
        """Close it at once."""


class ConnectionGate:
    """Everybody who is connected and has shown no token yet."""

    def __init__(
        self,
        most: int = LEAST_UNKNOWN,
        most_of_address: int = LEAST_UNKNOWN // 4,
        now: Callable[[], float] = time.monotonic,
        hard: int = 0,  # 0: so many times the bound
    ) -> None:
        self.dismissed = 0
        self.hard = hard or HARD_FACTOR * most
        self.most, self.most_of_address, self._now = most, most_of_address, now
        self._all: OrderedDict[AnonymousConnection, tuple[str, float]] = OrderedDict()
        self._of: dict[str, OrderedDict[AnonymousConnection, None]] = {}
        self._by_peer: dict[tuple[str, int], AnonymousConnection] = {}

    def __len__(self) -> int:
        return len(self._all)

    def enter(self, connection: AnonymousConnection, address: str) -> bool:
        """Lets a connection in; False: there are far too many, and it has to go."""
        mine = self._of.get(address)
        if len(self._all) >= self.hard:
            self.dismissed += 1
            return False
        if mine is not None and len(mine) >= self.most_of_address:
            self._evict(next(iter(mine)))
        elif len(self._all) >= self.most:
            self._evict(next(iter(self._all)))
        self._all[connection] = (address, self._now())
        self._of.setdefault(address, OrderedDict())[connection] = None
        return True

    def is_anonymous(self, connection: AnonymousConnection) -> bool:
        """Whether a connection has shown no token yet."""
        return connection in self._all

    def leave(self, connection: AnonymousConnection) -> None:
        """A connection has shown a token, or is gone."""
        client = self._all.pop(connection, None)
        if client is not None:
            mine = self._of[client[0]]
            del mine[connection]
            if not mine:
                del self._of[client[0]]

    def replace(self, before: AnonymousConnection, after: AnonymousConnection) -> None:
        """A connection is another object's from now on; it keeps its age."""
        client = self._all.get(before)
        if client is None:
            return
        self.leave(before)
        self._all[after] = client
        self._of.setdefault(client[0], OrderedDict())[after] = None

    def known_as(self, peer: tuple[str, int], connection: AnonymousConnection) -> None:
        """Remembers whose connection comes from an address and port."""
        self._by_peer[peer] = connection

    def forget(self, peer: tuple[str, int]) -> None:
        """A connection is gone."""
        self._by_peer.pop(peer, None)

    def passed(self, peer: tuple[str, int] | None) -> None:
        """Whoever connects from there has shown a good token."""
        connection = self._by_peer.get(peer) if peer is not None else None
        if connection is not None:
            self.leave(connection)

    def _evict(self, oldest: AnonymousConnection) -> None:
        if self._now() - self._all[oldest][1] > GRACE_SECONDS:
            self.leave(oldest)
            self.dismissed += 1
            oldest.dismiss()


def gate_for(files: int) -> ConnectionGate:
    """A gate for a process that may have so many files open; half of them are for others."""
    most = min(MOST_UNKNOWN, max(LEAST_UNKNOWN, files // 4))
    hard = max(HARD_FACTOR * LEAST_UNKNOWN, min(HARD_FACTOR * most, files // 2))
    return ConnectionGate(most, most * 3 // 4 if most > LEAST_UNKNOWN else most // 4, hard=hard)
