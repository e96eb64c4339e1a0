"""Commands on their way: sent again until each node says that it has them."""

from __future__ import annotations

from heapq import heappop, heappush

from msgspec import Struct

from phalanx.cluster.protocol.commands import Command, gang_of

Key = tuple[int, int]  # sequence, index


class UnconfirmedCommand(Struct):
    """A command that a node has not confirmed."""

    command: Command
    due_ns: int
    pause_ns: int


class Outbox:
    """At-least-once delivery. Not logged: after a failover the core says again what matters.

    A command to a whole fleet costs the same for each node: waiting commands are kept by node, and
    a heap holds when each is due (entries of confirmed ones are dropped when their time comes).
    """

    def __init__(self, resend_ns: int, most_pause_ns: int = 60_000_000_000) -> None:
        self.resend_ns = resend_ns
        self.most_pause_ns = most_pause_ns
        self._waiting: dict[int, dict[Key, UnconfirmedCommand]] = {}  # by node
        self._due: list[tuple[int, int, int, int]] = []  # due_ns, sequence, index, node

    def send(self, command: Command, now_ns: int) -> None:
        """A command was just sent to all its targets."""
        overtaken = gang_of(command)
        due = now_ns + self.resend_ns
        for node in command.target:
            waiting = self._waiting.setdefault(node, {})
            if overtaken is not None and waiting:
                _drop_older(waiting, *overtaken)
            waiting[command.sequence, command.index] = UnconfirmedCommand(
                command, due, self.resend_ns
            )
            heappush(self._due, (due, command.sequence, command.index, node))

    def applied(self, node: int, sequence: int, index: int) -> None:
        """A node confirmed a command."""
        waiting = self._waiting.get(node)
        if waiting is not None:
            waiting.pop((sequence, index), None)
            if not waiting:
                del self._waiting[node]

    def waits(self, node: int) -> bool:
        """Whether a node has not confirmed all that it was sent."""
        return node in self._waiting

    def forget(self, node: int) -> None:
        """A node is dead: nothing more is sent to it."""
        self._waiting.pop(node, None)

    def due(self, now_ns: int) -> list[tuple[int, Command]]:
        """What to send again now, to whom; pauses double."""
        again = []
        while self._due and self._due[0][0] <= now_ns:
            due, sequence, index, node = heappop(self._due)
            waiting = self._waiting.get(node, {}).get((sequence, index))
            if waiting is None or waiting.due_ns != due:
                continue
            waiting.pause_ns = min(2 * waiting.pause_ns, self.most_pause_ns)
            waiting.due_ns = now_ns + waiting.pause_ns
            heappush(self._due, (waiting.due_ns, sequence, index, node))
            again.append((node, waiting.command))
        return again

    def next_deadline_ns(self) -> int | None:
        """When something is to be sent again."""
        while self._due:
            due, sequence, index, node = self._due[0]
            waiting = self._waiting.get(node, {}).get((sequence, index))
            if waiting is not None and waiting.due_ns == due:
                return due
            heappop(self._due)
        return None


def _drop_older(waiting: dict[Key, UnconfirmedCommand], job: int, generation: int) -> None:
    stale = [
        key
        for key, each in waiting.items()
        if (known := gang_of(each.command)) is not None
        and known[0] == job
        and known[1] < generation
    ]
    for key in stale:
        del waiting[key]
