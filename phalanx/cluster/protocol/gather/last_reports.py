"""The last reports about a generation that was aborted or stopped: how far it came.

Reports of progress are seconds old, so that a log stays small. When a gang ends, whoever decides
about its steps asks its nodes; those that still answer know to the step what was safe.
"""

from __future__ import annotations

from msgspec import Struct

from phalanx.cluster.protocol.commands import Abort, Stop
from phalanx.cluster.protocol.events import GangStopped
from phalanx.cluster.protocol.messages import LastSteps

WAIT_NS = 1_000_000_000  # after the first answer, for all nodes that are still there
MOST_KEPT = 1024  # gangs that were stopped and nobody answered for


class StoppedGeneration(Struct):
    """One generation that is over, and what its nodes say of it."""

    generation: int
    nodes: dict[int, None] = {}  # that were told so
    answers: dict[int, LastSteps] = {}
    due_ns: int = 0  # when those that answered are enough; 0: nobody has, or it was said
    said: GangStopped | None = None


class LastReports:
    """All gangs that were told to stop, by job."""

    def __init__(self) -> None:
        self._stopped: dict[int, StoppedGeneration] = {}

    def expect(self, order: Abort | Stop, targets: tuple[int, ...], nodes: dict[int, None]) -> None:
        """Nodes are told that a generation is over; ``nodes``: those of it that took part."""
        stopped = self._stopped.get(order.job)
        if stopped is None or stopped.generation != order.generation:
            stopped = self._stopped[order.job] = StoppedGeneration(order.generation)
        stopped.nodes.update((node, None) for node in targets if node in nodes)
        while len(self._stopped) > MOST_KEPT:
            del self._stopped[next(iter(self._stopped))]

    def forget(self, job: int) -> None:
        """The next generation forms: whoever joins says what it keeps."""
        self._stopped.pop(job, None)

    def receive(self, message: LastSteps, now_ns: int) -> list[GangStopped]:
        """Takes in an answer; all of them together are said at once."""
        stopped = self._stopped.get(message.job)
        if stopped is None or stopped.generation != message.generation:
            return []
        if message.node not in stopped.nodes:
            return []  # it took no part
        stopped.answers[message.node] = message
        if all(node in stopped.answers for node in stopped.nodes):
            return self._said(message.job, stopped)
        stopped.due_ns = stopped.due_ns or now_ns + WAIT_NS
        return []

    def due(self, now_ns: int) -> list[GangStopped]:
        """What is said without those who do not answer."""
        late = [(job, each) for job, each in self._stopped.items() if 0 < each.due_ns <= now_ns]
        return [fact for job, stopped in late for fact in self._said(job, stopped)]

    def next_deadline_ns(self) -> int | None:
        """When the first gang has been waited for long enough."""
        waiting = (stopped.due_ns for stopped in self._stopped.values())
        return min((at for at in waiting if at), default=None)

    def _said(self, job: int, stopped: StoppedGeneration) -> list[GangStopped]:
        stopped.due_ns = 0
        answers = list(stopped.answers.values())
        committed = max(0, min(each.committed for each in answers))
        fact = GangStopped(
            job=job,
            generation=stopped.generation,
            step=max(committed, *(each.reached for each in answers)),
            committed=committed,
            durable=max(each.durable for each in answers),
        )
        known, stopped.said = stopped.said, fact
        return [fact] if fact != known else []
