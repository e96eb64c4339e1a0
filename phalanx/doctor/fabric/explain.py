"""Which part of a fabric explains the slow measurements: as few parts as possible.

A measurement is of an edge: a pair of nodes on one rail. Both ends, the path between them, the rail
and the uplinks of a leaf switch have a part in it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache

from msgspec import Struct

LEAST_SHARE = 0.75  # of a part's edges are slow where the part is to blame
FEW_EDGES = 12  # below this a bad node has so many of them that their median is its own
SPREAD = 3.0  # standard deviations that are noise
NORMAL = 1.4826  # standard deviations in a median absolute deviation
TIERS = ("leaf", "leaves", "pods")  # what pairs cross, the nearest first

Edge = tuple[int, int, int]  # two nodes in order, and a rail
Levels = dict[Edge, float]  # rate over what is usual; 1: usual


class PartKind(StrEnum):
    """What can be slow."""

    RAIL = "rail"  # of all nodes
    UPLINK = "uplink"  # of a leaf switch
    NODE = "node"  # on all its rails
    PORT = "port"  # of a node, on one rail: card, cable or the switch's port
    PATH = "path"  # between two nodes that are well otherwise


class FabricShape(Struct, frozen=True, kw_only=True):
    """The nodes that are measured, by number."""

    nodes: int
    rails: int = 1
    leaves: tuple[str, ...] = ()  # by node; none: it is not known where they hang
    pods: tuple[str, ...] = ()

    def tier(self, edge: Edge) -> str:
        """Edges of a tier can be compared: they cross the same levels of switches."""
        first, second, _ = edge
        if self.pods and self.pods[first] != self.pods[second]:
            return TIERS[2]
        if self.leaves and self.leaves[first] != self.leaves[second]:
            return TIERS[1]
        return TIERS[0]


class Part(Struct, frozen=True, kw_only=True):
    """A part of the fabric."""

    kind: PartKind
    nodes: tuple[int, ...] = ()
    rail: int = -1  # -1: all of them
    leaf: str = ""


def usual_rates(fleet: FabricShape, rates: Mapping[Edge, float]) -> dict[str, float]:
    """What edges of each tier usually reach, whatever a few bad ones do."""
    by_rail: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for edge, rate in rates.items():
        by_rail[fleet.tier(edge)][edge[2]].append(rate)
    # A slow rail must not pull down what rails are compared with: of two, the faster one counts.
    return {
        tier: statistics.median_high(_usual(found) for found in rails.values())
        for tier, rails in by_rail.items()
    }


def _usual(rates: Sequence[float]) -> float:
    if len(rates) >= FEW_EDGES:
        return statistics.median(rates)
    return sorted(rates)[len(rates) * 3 // 4]


def noise_of(levels: Iterable[float]) -> float:
    """The standard deviation of those that are well, however far off a few are."""
    values = list(levels)
    middle = statistics.median(values)
    return NORMAL * statistics.median(abs(level - middle) for level in values)


def slow_parts(fleet: FabricShape, levels: Levels, boundary: float) -> list[Part]:
    """The parts that explain all edges below the boundary; the one that explains most is first."""
    left = dict(levels)
    found: list[Part] = []
    while any(level < boundary for level in left.values()):
        edges = _edges_of_parts(fleet, left)
        slow = {
            part: sum(left[edge] < boundary for edge in touched) for part, touched in edges.items()
        }
        blamed = [
            part
            for part, count in slow.items()
            if count >= LEAST_SHARE * len(edges[part])
            and (part.kind == PartKind.PATH or len(edges[part]) > 1)
        ]
        # Of parts that explain as much, the larger one has edges that are well.
        worst = max(blamed, key=lambda part: (slow[part], -len(edges[part])))
        found.append(worst)
        for edge in edges[worst]:
            del left[edge]
    return found


def _edges_of_parts(fleet: FabricShape, edges: Iterable[Edge]) -> dict[Part, list[Edge]]:
    """Every part that could be blamed, and the measured edges that it has a part in."""
    touched: dict[Part, list[Edge]] = defaultdict(list)
    for edge in edges:
        for part in _parts_of(fleet, edge):
            touched[part].append(edge)
    return touched


def _parts_of(fleet: FabricShape, edge: Edge) -> tuple[Part, ...]:
    leaves: tuple[str, ...] = ()
    if fleet.leaves and fleet.tier(edge) != TIERS[0]:
        leaves = (fleet.leaves[edge[0]], fleet.leaves[edge[1]])
    return _parts(edge, fleet.rails > 1, leaves)


@lru_cache(maxsize=1 << 18)
def _parts(edge: Edge, several_rails: bool, leaves: tuple[str, ...]) -> tuple[Part, ...]:
    """Made once: a search asks for them again in every round."""
    first, second, rail = edge
    parts = [
        Part(kind=PartKind.NODE, nodes=(first,)),
        Part(kind=PartKind.NODE, nodes=(second,)),
        Part(kind=PartKind.PATH, nodes=(first, second)),
    ]
    if several_rails:
        parts += [
            Part(kind=PartKind.RAIL, rail=rail),
            Part(kind=PartKind.PORT, nodes=(first,), rail=rail),
            Part(kind=PartKind.PORT, nodes=(second,), rail=rail),
            Part(kind=PartKind.PATH, nodes=(first, second), rail=rail),
        ]
    return (*parts, *(Part(kind=PartKind.UPLINK, leaf=leaf) for leaf in leaves))


def concerns(fleet: FabricShape, part: Part, edge: Edge) -> bool:
    """Whether an edge is slow where a part is."""
    return part in _parts_of(fleet, edge)
