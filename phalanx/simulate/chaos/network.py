"""Links of nodes to controllers and to each other: late, lost, doubled, out of order, cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.simulate.draws import DrawStream
from phalanx.simulate.scenario.scenario import ChaosPart
from phalanx.simulate.world.agenda import Agenda

MS = 10**6
CONTROLLER = -1  # every controller's end of a link


class SimulatedNetwork:
    """One link each way between every node and the controllers."""

    def __init__(self, agenda: Agenda, luck: DrawStream, settings: ChaosPart) -> None:
        self.agenda = agenda
        self.sent = 0
        self._luck = luck
        self._part = settings
        self._cuts: dict[tuple[int, int], int] = {}  # (from, to): how many faults cut it
        self.slow: dict[int, int] = {}  # node: extra delay
        self.storm = 1.0  # factor on loss and duplicates

    def send(self, source: int, target: int, deliver: Callable[..., None], *args: Any) -> None:
        """Delivers a message, or not, or twice."""
        self.sent += 1
        settings, luck = self._part, self._luck
        if self.blocked(source, target) or luck.chance(min(0.9, settings.loss * self.storm)):
            return
        self.agenda.after(self._delay(source, target), deliver, *args)
        if luck.chance(min(0.9, settings.duplicates * self.storm)):
            self.agenda.after(self._delay(source, target), deliver, *args)

    def _delay(self, source: int, target: int) -> int:
        delay = 20 * MS + self._luck.below(180) * MS
        if self._luck.chance(self._part.reordered):
            delay += self._luck.below(2500) * MS
        return delay + self.slow.get(source, 0) + self.slow.get(target, 0)

    def blocked(self, source: int, target: int) -> bool:
        """Whether nothing gets through this way."""
        return (source, target) in self._cuts

    def parted(self, nodes: tuple[int, ...]) -> tuple[int, int] | None:
        """Two of some nodes between which nothing gets through; None: all reach each other."""
        for one, other in self._cuts:
            if one in nodes and other in nodes:
                return one, other
        return None

    def open(self, node: int) -> bool:
        """Whether a node can hold a connection."""
        return not (self.blocked(node, CONTROLLER) or self.blocked(CONTROLLER, node))

    def cut(self, source: int, target: int) -> None:
        """Nothing gets through this way from now on."""
        self._cuts[source, target] = self._cuts.get((source, target), 0) + 1

    def mend(self, source: int, target: int) -> None:
        """One of the faults that cut this way is over."""
        left = self._cuts.get((source, target), 0) - 1
        if left > 0:
            self._cuts[source, target] = left
        else:
            self._cuts.pop((source, target), None)

    def mend_all(self) -> None:
        """Every link works."""
        self._cuts.clear()
        self.slow.clear()
        self.storm = 1.0
