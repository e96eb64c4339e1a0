"""A gang that makes no steps is looked at before anything is done about it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from msgspec import Struct, structs

from phalanx.cluster.protocol.events import EventBody, NoProgress
from phalanx.cluster.watch import StepWatch
from phalanx.control.wire.agent_messages import LookAt, Seen, encode
from phalanx.control.wire.websocket_frames import framed

LOOK_SECONDS = 1.5  # until nodes that have not answered count as silent


class OpenDiagnosis(Struct):
    """One gang that is being looked at."""

    fact: NoProgress
    nodes: tuple[int, ...]
    seen: dict[int, Seen] = {}


class HangDiagnosis:
    """Asks the nodes of a hung gang what their ranks do; then tells who is behind."""

    def __init__(
        self,
        watch: StepWatch,
        push: Callable[[int, bytes], bool],
        tell: Callable[[Sequence[EventBody]], None],
        now_ns: Callable[[], int],
    ) -> None:
        self._watch, self._push, self._tell, self._now_ns = watch, push, tell, now_ns
        self._open: dict[int, OpenDiagnosis] = {}

    def begin(self, fact: NoProgress, nodes: tuple[int, ...]) -> None:
        """Look at a gang; the fact is told when enough is known.

        While a node cannot be asked, as after the server's own restart, nothing is told: its
        silence is for liveness to judge, and the gang is looked at again at its next deadline.
        """
        if fact.job in self._open:
            return
        frame = framed(encode(LookAt(job=fact.job, generation=fact.generation)))
        if not all(self._push(node, frame) for node in nodes):
            return
        opened = self._open[fact.job] = OpenDiagnosis(fact, nodes)
        asyncio.get_running_loop().call_later(LOOK_SECONDS, self._close, opened)

    def receive(self, seen: Seen) -> None:
        """A node has looked."""
        opened = self._open.get(seen.job)
        if opened is None or opened.fact.generation != seen.generation:
            return
        if seen.node not in opened.nodes:
            return
        opened.seen[seen.node] = seen
        if len(opened.seen) == len(opened.nodes):
            self._close(opened)

    def _close(self, opened: OpenDiagnosis) -> None:
        fact = opened.fact
        if self._open.get(fact.job) is not opened:
            return
        del self._open[fact.job]
        made = steps_made(opened)
        if made > fact.step:  # reports were late, and nobody hangs
            self._watch.alive(fact.job, fact.generation, made, self._now_ns())
            return
        for seen in opened.seen.values():
            for rank, entered in seen.ranks.items():
                if self._watch.hosts(fact.job, seen.node, rank):
                    self._watch.entered(fact.job, rank, entered)
        named = self._watch.named(fact)
        kept = sorted({seen.folder for seen in opened.seen.values()})
        detail = "stacks and flight recorders: " + ", ".join(kept[:4]) if kept else ""
        self._tell([structs.replace(named, detail=detail)])


def steps_made(opened: OpenDiagnosis) -> int:
    """The step that every rank of a gang says it has completed; -1: not all of them answered."""
    ranks = [entered for seen in opened.seen.values() for entered in seen.ranks.values()]
    if len(opened.seen) < len(opened.nodes) or not ranks:
        return -1
    return min(ranks) // 2  # see ``Evidence``: twice the step, and whether it waits
