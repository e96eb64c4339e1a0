"""How many faults should have hit a job: rates times what jobs held, looked at regularly.

On a fleet that one job fills, every fault of its nodes hits it. Elsewhere a fault may meet an idle
node, or a GPU of a busy node that nobody holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from phalanx.simulate.incidents import (
    PLACE_OF,
    causes_of,
    expected_interruptions,
    lemons,
)
from phalanx.simulate.models import Cause
from phalanx.simulate.shape import job_nodes

if TYPE_CHECKING:
    from phalanx.simulate.world import World

Floats = NDArray[np.float64]

LOOKS = 500  # over the whole time
MOST_BETWEEN_NS = 1800 * 10**9


class Exposure:
    """The mean chance of each cause to hit a job."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._causes = causes_of(world.scenario)
        self._hits = np.zeros(len(self._causes))
        self._looks = 0
        self._every = max(1, min(world.end_ns // LOOKS, MOST_BETWEEN_NS))
        faults, nodes = world.scenario.faults, len(world.fleet)
        weights = np.ones(nodes)
        weights[lemons(world.scenario, nodes, world.draws)] = faults.lemon_factor
        self._weights = weights / weights.sum()

    def start(self) -> None:
        """Looks from now on."""
        if self._world.scenario.workload.kind != "one-job":
            self._world.agenda.after(self._every, self._look)

    def _look(self) -> None:
        self._world.agenda.after(self._every, self._look)
        columns = self._world.fleet.columns
        held = (columns.gpus - columns.free_gpus).astype(float)
        held[list(self._world.broken)] = 0  # what is broken does not break again
        shares = held / np.maximum(1, columns.gpus)
        self._hits += [
            self._chance(cause, (held > 0).astype(float), shares) for cause in self._causes
        ]
        self._looks += 1

    def _chance(self, cause: Cause, busy: Floats, shares: Floats) -> float:
        """That a fault of this cause hits a job now."""
        if cause.scope in PLACE_OF:
            place = getattr(self._world.fleet.columns, PLACE_OF[cause.scope])
            busy = (np.bincount(place, busy) > 0).astype(float)[place]
        elif cause.scope == "node" and cause.symptom == "exit":
            busy = shares  # one GPU of the node fails
        alone = float(np.dot(self._weights, busy))
        together = cause.nodes if cause.scope == "scattered" else 1
        return 1 - (1 - alone) ** together

    def expected(self, days: float) -> float:
        """Interruptions that the rates give for what jobs held."""
        if self._world.scenario.workload.kind == "one-job":
            return expected_interruptions(self._world.scenario)
        chances = self._hits / max(1, self._looks)
        # Rates are of the nodes that jobs run on; spares break as often.
        scale = len(self._world.fleet) / job_nodes(self._world.scenario)
        rates = [cause.per_day * scale for cause in self._causes]
        return days * float(np.dot(rates, chances)) if rates else 0.0
