"""Faults in time: which nodes, which cause, when, how they show and how long they last.

Fault i of a cause is a function of (seed, cause, i) alone (see ``draws``), whatever the policy of
the core and the rates of other causes. Spares have draws of their own: the nodes that jobs run on
meet the same faults however many stand by. So worlds are compared under the same faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.policy import DAY_NS
from phalanx.simulate.draws import DrawStream, SeedDraws
from phalanx.simulate.scenario.fault_models import Symptom
from phalanx.simulate.scenario.rates import CauseRate, causes_of, of_job_per_day
from phalanx.simulate.scenario.scenario import Scenario
from phalanx.simulate.scenario.shape import job_nodes

HOUR_NS = 3600 * 10**9
PLACE_OF = {"rack": "rack", "power": "power", "leaf": "leaf"}
GROUPS = ("jobs", "spares")  # the first nodes of a fleet, and those that stand by

Floats = NDArray[np.float64]


class Incident(Struct, frozen=True, kw_only=True):
    """One fault: it takes all its nodes at once."""

    number: int  # of its cause and group of nodes
    time_ns: int
    cause: str
    symptom: Symptom
    nodes: tuple[int, ...]
    repair_ns: int  # 0: nothing is broken afterwards
    quantile: float  # luck of everything else about it, in [0, 1)


def expected_interruptions(scenario: Scenario) -> float:
    """Mean number of unexpected incidents of a job on all nodes but the spares."""
    of_nodes = sum(cause.per_day for cause in causes_of(scenario))
    return (of_nodes + of_job_per_day(scenario, scenario.fleet.gpus)) * scenario.days


class Rates:
    """How often a fault begins at each node.

    Nodes that jobs run on have the rate of the scenario all together; lemons fail as many times
    as often as others as the scenario says, and spares as often as their like among the others.
    """

    def __init__(self, scenario: Scenario, fleet: Fleet, draws: SeedDraws) -> None:
        self._fleet = fleet
        self.jobs = min(job_nodes(scenario), len(fleet))
        self.lemons = lemons(scenario, len(fleet), draws)
        weights = fleet.columns.gpus / scenario.fleet.node_gpus  # of GPUs, as many can break
        weights[self.lemons] *= scenario.faults.lemon_factor
        self._weights = weights / weights[: self.jobs].sum()
        few = draws.stream("corrupting")
        chosen: dict[int, None] = {}
        while len(chosen) < min(scenario.faults.corrupting_nodes, self.jobs):
            chosen[few.below(self.jobs)] = None
        self._corrupting = list(chosen)

    def group(self, name: str) -> slice:
        """The nodes of a group."""
        return slice(0, self.jobs) if name == "jobs" else slice(self.jobs, len(self._fleet))

    def per_day(self, cause: CauseRate) -> Floats:
        """Faults a day that begin at each node."""
        weights: Floats = self._weights
        if self._corrupting and cause.symptom == "corruption":
            weights = np.zeros(len(self._fleet))
            weights[self._corrupting] = 1 / len(self._corrupting)
        elif cause.scope in PLACE_OF and self.jobs < len(self._fleet):
            # Where spares share a domain with other nodes, those say how often it fails.
            place = self.place(cause)
            shared = np.isin(place, place[: self.jobs])
            shared[: self.jobs] = False
            weights = np.where(shared, 0.0, weights)
        found: Floats = cause.per_day * weights
        return found

    def place(self, cause: CauseRate) -> NDArray[np.int32]:
        """The domain of each node that a fault of this cause takes whole."""
        found: NDArray[np.int32] = getattr(self._fleet.columns, PLACE_OF[cause.scope])
        return found


class Incidents:
    """All faults of a seed, in order of time."""

    def __init__(self, scenario: Scenario, fleet: Fleet, draws: SeedDraws) -> None:
        self._scenario = scenario
        self._draws = draws
        self._rates = Rates(scenario, fleet, draws)
        self._causes = causes_of(scenario)

    def __iter__(self) -> Iterator[Incident]:
        each = [self._of(cause, group) for cause in self._causes for group in GROUPS]
        return merge(*each, key=lambda incident: incident.time_ns)

    def _of(self, cause: CauseRate, group: str) -> Iterator[Incident]:
        """The faults of one cause that begin at nodes of one group."""
        nodes = self._rates.group(group)
        rates = self._rates.per_day(cause)[nodes]
        arrivals = _arrivals(self._draws, ("fault", cause.key, group), rates)
        for number, (time_ns, index, luck) in enumerate(arrivals):
            found = self._together(cause, nodes, nodes.start + index, luck.at(1))
            yield self._make(cause, number, time_ns, found, luck)

    def _make(
        self, cause: CauseRate, number: int, time_ns: int, nodes: tuple[int, ...], luck: DrawStream
    ) -> Incident:
        own = self._scenario.repair
        hours = cause.repair_hours if own.hours is None or not cause.repair_hours else own.hours
        return Incident(
            number=number,
            time_ns=time_ns,
            cause=cause.name,
            symptom=cause.symptom,
            nodes=nodes,
            repair_ns=int(hours * HOUR_NS * luck.factor(own.spread)),
            quantile=luck.uniform(),
        )

    def _together(
        self, cause: CauseRate, group: slice, first: int, luck: DrawStream
    ) -> tuple[int, ...]:
        if cause.scope == "node":
            return (first,)
        if cause.scope == "scattered":
            broken_nodes, size = dict.fromkeys([first]), group.stop - group.start
            while len(broken_nodes) < min(cause.nodes, size):
                broken_nodes[group.start + luck.below(size)] = None
            return tuple(broken_nodes)
        place = self._rates.place(cause)
        return tuple(int(node) for node in np.nonzero(place == place[first])[0])


def on_nodes(
    scenario: Scenario, fleet: Fleet, draws: SeedDraws, purpose: str, per_1000_node_days: float
) -> Iterator[tuple[int, int, DrawStream]]:
    """Things that happen to any node alike, in order: when, to which, and the luck of the rest.

    As with faults, spares have draws of their own.
    """
    jobs = min(job_nodes(scenario), len(fleet))
    rate = per_1000_node_days / 1000

    def of(group: str, start: int, count: int) -> Iterator[tuple[int, int, DrawStream]]:
        for time_ns, index, luck in _arrivals(draws, (purpose, group), np.full(count, rate)):
            yield time_ns, start + index, luck

    each = of("jobs", 0, jobs), of("spares", jobs, len(fleet) - jobs)
    return merge(*each, key=lambda arrival: arrival[:2])


def _arrivals(
    draws: SeedDraws, purpose: tuple[str, ...], per_day: Floats
) -> Iterator[tuple[int, int, DrawStream]]:
    """When something happens and to which of some things, each with a rate of its own."""
    cumulated = np.cumsum(per_day)
    if not len(cumulated) or cumulated[-1] <= 0:
        return
    times, lucks = draws.stream(*purpose, "time"), draws.stream(*purpose, "each")
    total = float(cumulated[-1])
    time, number = 0.0, 0
    while True:
        time += times.exponential(DAY_NS / total)
        luck = lucks.at(number)
        index = int(np.searchsorted(cumulated, luck.uniform() * total, "right"))
        yield int(time), min(index, len(cumulated) - 1), luck
        number += 1


def lemons(scenario: Scenario, nodes: int, draws: SeedDraws) -> list[int]:
    """Nodes that fail more often than others."""
    stream = draws.stream("lemons")
    share = scenario.faults.lemon_share
    return [node for node in range(nodes) if share and stream.chance(share)]
