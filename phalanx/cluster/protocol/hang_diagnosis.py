"""A gang that makes no steps is looked at before anything is done about it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, structs

from phalanx.cluster.protocol.events import EventBody, NoProgress
from phalanx.cluster.protocol.messages import Seen
from phalanx.cluster.protocol.step_watch import StepWatch

LOOK_NS = 1_500_000_000  # until nodes that have not answered count as silent


class OpenDiagnosis(Struct):
    """One gang that is being looked at."""

    fact: NoProgress
    nodes: tuple[int, ...]
    due_ns: int
    seen: dict[int, Seen] = {}


class HangDiagnosis:
    """Who of a hung gang is behind, by what its nodes see their ranks do."""

    def __init__(self, watch: StepWatch) -> None:
        self._watch = watch
        self._open: dict[int, OpenDiagnosis] = {}

    def begin(self, fact: NoProgress, nodes: tuple[int, ...], now_ns: int) -> bool:
        """Whether the nodes are to be asked; the fact is told when enough is known."""
        if fact.job in self._open:
            return False
        self._open[fact.job] = OpenDiagnosis(fact, nodes, now_ns + LOOK_NS)
        return True

    def abandon(self, job: int) -> None:
        """A node cannot be asked: nothing is told of its gang."""
        self._open.pop(job, None)

    def receive(self, seen: Seen, now_ns: int) -> Sequence[EventBody]:
        """A node has looked."""
        opened = self._open.get(seen.job)
        if opened is None or opened.fact.generation != seen.generation:
            return ()
        if seen.node not in opened.nodes:
            return ()
        opened.seen[seen.node] = seen
        return self._close(opened, now_ns) if len(opened.seen) == len(opened.nodes) else ()

    def due(self, now_ns: int) -> list[EventBody]:
        """What is known of gangs whose nodes have had the time to answer."""
        late = [opened for opened in self._open.values() if opened.due_ns <= now_ns]
        return [fact for opened in late for fact in self._close(opened, now_ns)]

    def next_deadline_ns(self) -> int | None:
        """When the first diagnosis ends, whoever has answered."""
        if not self._open:
            return None
        return min(opened.due_ns for opened in self._open.values())

    def _close(self, opened: OpenDiagnosis, now_ns: int) -> Sequence[EventBody]:
        fact = opened.fact
        del self._open[fact.job]
        made = steps_made(opened)
        if made > fact.step:  # reports were late, and nobody hangs
            self._watch.alive(fact.job, fact.generation, made, now_ns)
            return ()
        for seen in opened.seen.values():
            for rank, entered in seen.ranks.items():
                if self._watch.hosts(fact.job, seen.node, rank):
                    self._watch.entered(fact.job, rank, entered)
        named = self._watch.named(fact)
        kept = sorted({seen.folder for seen in opened.seen.values()})
        detail = "stacks and flight recorders: " + ", ".join(kept[:4]) if kept else ""
        return (structs.replace(named, detail=detail),)


def steps_made(opened: OpenDiagnosis) -> int:
    """The step that every rank of a gang says it has completed; -1: not all of them answered."""
    ranks = [entered for seen in opened.seen.values() for entered in seen.ranks.values()]
    if len(opened.seen) < len(opened.nodes) or not ranks:
        return -1
    return min(ranks) // 2  # see ``Evidence``: twice the step, and whether it waits
