"""When the fabric is measured without being asked: nodes that joined, or that were doubted; pure.

A node is new until it has been measured since it became healthy. A wave of new nodes is measured
once, when it has settled. What was found slow is drained only within a bound: where many nodes are
slow at once, the fabric is, or the measurement.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from phalanx.doctor.fabric.report import FabricProblem

LEAST_NODES = 3  # of two nobody can be told apart
SETTLE_SECONDS, LONGEST_SECONDS = 10.0, 120.0  # after the last new node; after the first
PAUSE_SECONDS = 60.0  # after a measurement that came to nothing
DRAIN_WINDOW_SECONDS, MOST_DRAINED_SHARE, LEAST_DRAINED = 3600.0, 0.05, 1


class SeenNode(NamedTuple):
    """A node at one look."""

    name: str
    healthy: bool
    since_ns: int  # that it has been so
    free: bool  # it could take a job now


class FabricWatch:
    """``due`` says for which nodes the fabric is to be measured now."""

    def __init__(self) -> None:
        self._since: dict[str, int] = {}  # of healthy nodes, at the last look
        self._measured: dict[str, int] = {}  # since when they were healthy then
        self._new: dict[str, float] = {}  # and when they were first seen so
        self._not_before = 0.0
        self._drained: list[float] = []

    def due(self, now: float, nodes: Sequence[SeenNode]) -> tuple[str, ...]:
        """New nodes that are free, once no others follow; none: nothing is measured now."""
        self._since = {node.name: node.since_ns for node in nodes if node.healthy}
        self._new = {
            name: self._new.get(name, now)
            for name, since_ns in self._since.items()
            if self._measured.get(name) != since_ns
        }
        free = {node.name for node in nodes if node.healthy and node.free}
        waiting = {name: seen for name, seen in self._new.items() if name in free}
        if not waiting or len(free) < LEAST_NODES or now < self._not_before:
            return ()
        last, first = max(waiting.values()), min(waiting.values())
        settled = now - last >= SETTLE_SECONDS or now - first >= LONGEST_SECONDS
        return tuple(waiting) if settled else ()

    def measured(self, names: Iterable[str]) -> None:
        """They are new no more."""
        for name in names:
            if name in self._since:
                self._measured[name] = self._since[name]

    def not_measured(self, now: float) -> None:
        """It came to nothing: not again at once."""
        self._not_before = now + PAUSE_SECONDS

    def to_drain(self, now: float, problems: Iterable[FabricProblem]) -> tuple[str, ...]:
        """Nodes that alone are to blame; none where they would be too many within an hour."""
        names = tuple(dict.fromkeys(each.nodes[0] for each in problems if len(each.nodes) == 1))
        self._drained = [at for at in self._drained if at > now - DRAIN_WINDOW_SECONDS]
        most = max(LEAST_DRAINED, int(MOST_DRAINED_SHARE * len(self._since)))
        if len(self._drained) + len(names) > most:
            return ()
        self._drained += [now] * len(names)
        return names
