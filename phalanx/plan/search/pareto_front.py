"""What a search has found so far, and what can therefore no longer matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from phalanx.plan.grid import Bools, Floats, Grid
from phalanx.plan.memory.offload import OffloadedBytes
from phalanx.plan.workload import Mapping

SHOWN = 10
FRONT_SLOWER = 2.0  # the front ends at this multiple of the fastest step
Score = Literal["late", "seconds", "memory"]


@dataclass(frozen=True)
class PricedMappings:
    """Mappings that fit, with their prices."""

    grid: Grid
    seconds: Floats
    late: Floats  # the 90th percentile
    held: Floats  # bytes on the fullest rank


@dataclass(frozen=True)
class PricedMapping:
    """A single mapping with its price."""

    mapping: Mapping
    seconds: float
    late: float
    held: float


@dataclass(frozen=True)
class SmallestMapping:
    """The mapping that takes least of a device, and what it keeps elsewhere."""

    mapping: Mapping
    held: float
    host: float
    nvme: float


class ParetoFront:
    """Prices so far: the best few, and the front of time against memory."""

    def __init__(self, score: Score, surely: float) -> None:
        self.score, self.surely = score, surely  # late is at least surely * seconds
        self.parts: list[PricedMappings] = []
        self.priced = 0
        self.smallest: SmallestMapping | None = None
        self._best: Floats = np.full(SHOWN, np.inf)
        self._fastest = np.inf
        self._front_held: Floats = np.zeros(0)
        self._front_seconds: Floats = np.zeros(0)

    def is_beyond(self, floor: float) -> bool:
        """Whether no step of at least ``floor`` seconds can matter, whatever it holds."""
        if self.score == "memory":
            return False
        least = floor * (self.surely if self.score == "late" else 1.0)
        return least > self._best[-1] and floor > FRONT_SLOWER * self._fastest

    def may_matter(self, floors: Floats, held: Floats) -> Bools:
        """Which mappings of at least so many seconds may be among the best or on the front."""
        least = {"memory": held, "late": floors * self.surely, "seconds": floors}[self.score]
        among_best = least <= self._best[-1]
        if not len(self._front_held):
            return np.ones(len(floors), dtype=bool)
        index = np.searchsorted(self._front_held, held, side="right") - 1
        beaten = (index >= 0) & (self._front_seconds[np.maximum(index, 0)] <= floors)
        found: Bools = among_best | (~beaten & (floors <= FRONT_SLOWER * self._fastest))
        return found

    def saw(self, grid: Grid, held: Floats, away: OffloadedBytes) -> None:
        """Remember the smallest mapping, for the message where none fits."""
        least = int(np.argmin(held))
        if self.smallest is None or held[least] < self.smallest.held:
            rest = float(away.host[least]), float(away.nvme[least])
            self.smallest = SmallestMapping(grid.mapping(least), float(held[least]), *rest)

    def add(self, part: PricedMappings) -> None:
        """Take in prices and tighten the bounds."""
        self.parts.append(part)
        self.priced += len(part.grid)
        score = {"memory": part.held, "late": part.late, "seconds": part.seconds}[self.score]
        self._best = np.sort(np.concatenate((self._best, score)))[:SHOWN]
        self._fastest = min(self._fastest, float(part.seconds.min()))
        held = np.concatenate((self._front_held, part.held))
        seconds = np.concatenate((self._front_seconds, part.seconds))
        chosen = front(seconds, held)[::-1]  # smallest first, and so slowest
        self._front_held, self._front_seconds = held[chosen], seconds[chosen]

    def result(self) -> tuple[list[PricedMapping], list[PricedMapping]]:
        """The best few, best first, and the front, fastest first."""
        seconds, late, held = (
            np.concatenate([getattr(part, name) for part in self.parts])
            for name in ("seconds", "late", "held")
        )
        starts = np.cumsum([0] + [len(part.grid) for part in self.parts])

        def one(index: int) -> PricedMapping:
            chunk = int(np.searchsorted(starts, index, side="right")) - 1
            mapping = self.parts[chunk].grid.mapping(int(index - starts[chunk]))
            return PricedMapping(
                mapping, float(seconds[index]), float(late[index]), float(held[index])
            )

        score = {"memory": held, "late": late, "seconds": seconds}[self.score]
        # Of equals, the one with more room; of equally small ones, the fastest.
        order = np.lexsort((late if self.score == "memory" else held, score))
        edge = [index for index in front(seconds, held) if seconds[index] <= self._slowest()]
        return [one(int(i)) for i in order[:SHOWN]], [one(i) for i in edge]

    def _slowest(self) -> float:
        return FRONT_SLOWER * float(self._fastest)


def front(seconds: Floats, held: Floats) -> list[int]:
    """Indices that nothing beats in both time and memory, fastest first."""
    order = np.lexsort((held, seconds))
    least = np.minimum.accumulate(held[order])
    new = np.concatenate(([True], least[1:] < least[:-1]))
    return [int(index) for index in order[new]]
