"""Commands on their way: sent again until each node says that it has them."""

from __future__ import annotations

from msgspec import Struct

from phalanx.cluster.commands import Abort, Command, Drain, Form, Restore, Stop

Key = tuple[int, int, int]  # node, sequence, index


class Waiting(Struct):
    """A command that a node has not confirmed."""

    command: Command
    due_ns: int
    pause_ns: int


class Outbox:
    """At-least-once delivery. Not logged: after a failover the core says again what matters."""

    def __init__(self, resend_ns: int, most_pause_ns: int = 60_000_000_000) -> None:
        self.resend_ns = resend_ns
        self.most_pause_ns = most_pause_ns
        self._waiting: dict[Key, Waiting] = {}

    def send(self, command: Command, now_ns: int) -> None:
        """A command was just sent to all its targets."""
        overtaken = _job_of(command)
        for node in command.target:
            if overtaken is not None:
                self._drop_older(node, *overtaken)
            key = (node, command.sequence, command.index)
            self._waiting[key] = Waiting(command, now_ns + self.resend_ns, self.resend_ns)

    def applied(self, node: int, sequence: int, index: int) -> None:
        """A node confirmed a command."""
        self._waiting.pop((node, sequence, index), None)

    def forget(self, node: int) -> None:
        """A node is dead: nothing more is sent to it."""
        for key in [key for key in self._waiting if key[0] == node]:
            del self._waiting[key]

    def due(self, now_ns: int) -> list[tuple[int, Command]]:
        """What to send again now, to whom; pauses double."""
        found = []
        for (node, _, _), waiting in self._waiting.items():
            if waiting.due_ns <= now_ns:
                waiting.pause_ns = min(2 * waiting.pause_ns, self.most_pause_ns)
                waiting.due_ns = now_ns + waiting.pause_ns
                found.append((node, waiting.command))
        return found

    def next_deadline_ns(self) -> int | None:
        """When something is to be sent again."""
        return min((waiting.due_ns for waiting in self._waiting.values()), default=None)

    def _drop_older(self, node: int, job: int, generation: int) -> None:
        stale = [
            key
            for key, waiting in self._waiting.items()
            if key[0] == node
            and (known := _job_of(waiting.command)) is not None
            and known[0] == job
            and known[1] < generation
        ]
        for key in stale:
            del self._waiting[key]


def _job_of(command: Command) -> tuple[int, int] | None:
    body = command.body
    if isinstance(body, Form | Restore | Abort | Drain | Stop):
        return body.job, body.generation
    return None
