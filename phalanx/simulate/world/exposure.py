"""How many faults should have hit a job: rates times what jobs held, looked at regularly.

On a fleet that one job fills, every fault of its nodes hits it. Elsewhere a fault may meet an idle
node, or a GPU of a busy node that nobody holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from phalanx.simulate.scenario.rates import CauseRate, causes_of
from phalanx.simulate.world.incidents import (
    GROUPS,
    PLACE_OF,
    Floats,
    Rates,
    expected_interruptions,
)

if TYPE_CHECKING:
    from phalanx.simulate.world.world import World

LOOKS = 500  # over the whole time
MOST_BETWEEN_NS = 1800 * 10**9


class Exposure:
    """Faults a day that would have hit a job, at each look."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rates = Rates(world.scenario, world.fleet, world.draws)
        self._causes = [(cause, self._rates.per_day(cause)) for cause in causes_of(world.scenario)]
        self._hits_per_day = 0.0  # summed over looks
        self._looks = 0
        self._every = max(1, min(world.end_ns // LOOKS, MOST_BETWEEN_NS))

    def start(self) -> None:
        """Looks from now on."""
        if self._world.scenario.workload.kind != "one-job":
            self._world.agenda.after(self._every, self._look)

    def _look(self) -> None:
        self._world.agenda.after(self._every, self._look)
        columns = self._world.fleet.columns
        used_gpus = (columns.gpus - columns.free_gpus).astype(float)
        used_gpus[list(self._world.broken)] = 0  # what is broken does not break again
        shares = used_gpus / np.maximum(1, columns.gpus)
        busy = (used_gpus > 0).astype(float)
        self._hits_per_day += sum(
            self._per_day(cause, rates, busy, shares) for cause, rates in self._causes
        )
        self._hits_per_day += self._world.program_faults.per_day()
        self._looks += 1

    def _per_day(self, cause: CauseRate, rates: Floats, busy: Floats, shares: Floats) -> float:
        """Faults of this cause that would hit a job now."""
        if cause.scope == "scattered":
            return sum(self._scattered(cause, rates, busy, name) for name in GROUPS)
        if cause.scope in PLACE_OF:
            place = self._rates.place(cause)
            busy = (np.bincount(place, busy) > 0).astype(float)[place]
        elif cause.symptom == "exit":
            busy = shares  # one GPU of the node fails
        return float(np.dot(rates, busy))

    def _scattered(self, cause: CauseRate, rates: Floats, busy: Floats, name: str) -> float:
        """Its first node is taken by the rates, the others anywhere in the group."""
        nodes = self._rates.group(name)
        total = float(rates[nodes].sum())
        if not total:
            return 0.0
        first = float(np.dot(rates[nodes], busy[nodes])) / total
        other = float(busy[nodes].mean())
        together = min(cause.nodes, nodes.stop - nodes.start)
        missed: float = (1 - first) * (1 - other) ** (together - 1)
        return total * (1 - missed)

    def expected(self, days: float) -> float:
        """Interruptions that the rates give for what jobs held."""
        if self._world.scenario.workload.kind == "one-job":
            return expected_interruptions(self._world.scenario)
        return days * self._hits_per_day / max(1, self._looks)
