"""Faults in time: which nodes, which cause, when, how they show and how long they last.

The i-th incident of a seed is a function of the seed and i alone (see ``draws``), whatever the
policy of the core: two policies are compared under the same faults.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

import numpy as np
from msgspec import Struct

from phalanx.cluster.fleet import Fleet
from phalanx.cluster.policy import DAY_NS
from phalanx.simulate.draws import Draws, Stream
from phalanx.simulate.models import Cause, Symptom, causes_in, model
from phalanx.simulate.scenario import Scenario
from phalanx.simulate.shape import job_nodes

HOUR_NS = 3600 * 10**9
PLACE_OF = {"rack": "rack", "power": "power", "leaf": "leaf"}


class Incident(Struct, frozen=True, kw_only=True):
    """One fault: it takes all its nodes at once."""

    number: int
    time_ns: int
    cause: str
    symptom: Symptom
    nodes: tuple[int, ...]
    repair_ns: int  # 0: nothing is broken afterwards
    quantile: float  # luck of everything else about it, in [0, 1)


def causes_of(scenario: Scenario) -> list[Cause]:
    """Every cause with its rate for nodes that jobs run on."""
    faults, fleet = scenario.faults, scenario.fleet
    return causes_in(
        model(faults.model),
        gpus=fleet.gpus,
        node_gpus=fleet.node_gpus,
        per_1000=faults.per_1000_node_days,
        own=faults.causes,
        domains=faults.domains,
    )


def expected_interruptions(scenario: Scenario) -> float:
    """Mean number of unexpected incidents on the nodes that jobs run on."""
    return sum(cause.per_day for cause in causes_of(scenario)) * scenario.days


class Incidents:
    """All faults of a seed, in order of time."""

    def __init__(self, scenario: Scenario, fleet: Fleet, draws: Draws) -> None:
        self._scenario = scenario
        self._fleet = fleet
        self._causes = causes_of(scenario)
        self._cumulated = list(accumulate(cause.per_day for cause in self._causes))
        # Spares break as often as the others.
        scale = len(fleet) / job_nodes(scenario)
        self.per_day = self._cumulated[-1] * scale if self._cumulated else 0.0
        self._times = draws.stream("fault", "time")
        self._each = draws.stream("fault", "each")
        self._lemons = lemons(scenario, len(fleet), draws)
        few = draws.stream("corrupting")
        count = min(scenario.faults.corrupting_nodes, len(fleet))
        chosen: dict[int, None] = {}
        while len(chosen) < count:
            chosen[few.below(len(fleet))] = None
        self._corrupting = list(chosen)

    def __iter__(self) -> Iterator[Incident]:
        if self.per_day <= 0:
            return
        mean_ns = DAY_NS / self.per_day
        time = 0.0
        number = 0
        while True:
            time += self._times.exponential(mean_ns)
            yield self._make(number, int(time))
            number += 1

    def _make(self, number: int, time_ns: int) -> Incident:
        luck = self._each.at(number)
        point = luck.uniform() * self._cumulated[-1]
        cause = self._causes[bisect_right(self._cumulated, point, hi=len(self._cumulated) - 1)]
        first = self._node(cause, luck.uniform(), luck.uniform())
        own = self._scenario.repair
        hours = cause.repair_hours if own.hours is None or not cause.repair_hours else own.hours
        # A lognormal factor whose mean is one.
        factor = luck.lognormal(1.0, own.spread) * np.exp(-(own.spread**2) / 2)
        return Incident(
            number=number,
            time_ns=time_ns,
            cause=cause.name,
            symptom=cause.symptom,
            nodes=self._together(cause, first, luck.at(1)),
            repair_ns=int(hours * HOUR_NS * float(factor)),
            quantile=luck.uniform(),
        )

    def _node(self, cause: Cause, which: float, kind: float) -> int:
        """A node at random; lemons have their own part of all faults."""
        faults = self._scenario.faults
        if self._corrupting and cause.symptom == "corruption":
            return self._corrupting[int(which * len(self._corrupting))]
        heavy = faults.lemon_share * faults.lemon_factor
        if self._lemons and kind < heavy / (heavy + 1 - faults.lemon_share):
            return self._lemons[int(which * len(self._lemons))]
        return int(which * len(self._fleet))

    def _together(self, cause: Cause, first: int, luck: Stream) -> tuple[int, ...]:
        if cause.scope == "node":
            return (first,)
        if cause.scope == "scattered":
            found = dict.fromkeys([first])
            while len(found) < min(cause.nodes, len(self._fleet)):
                found[luck.below(len(self._fleet))] = None
            return tuple(found)
        column = getattr(self._fleet.columns, PLACE_OF[cause.scope])
        return tuple(int(node) for node in np.nonzero(column == column[first])[0])


def lemons(scenario: Scenario, nodes: int, draws: Draws) -> list[int]:
    """Nodes that fail more often than others."""
    stream = draws.stream("lemons")
    share = scenario.faults.lemon_share
    return [node for node in range(nodes) if share and stream.chance(share)]
