"""Which nodes of those with room, and in which order of ranks.

A gang is a grid: stages of a pipeline times columns (neighbours on the data axis), in cells of the
slots that must share an NVLink domain. Columns of a stage talk most, so a leaf should hold
neighbours of one stage; but a pod that holds whole pipelines sends only its rings' ends to other
pods. Which of these weighs more depends on the bytes of each axis and on the fabric, so a few
arrangements are made and the cheapest by ``communication.cost_of`` is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.cluster.fleet.columns import Column
from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.placement.communication import (
    Cost,
    Exchange,
    cost_of,
    flows_of,
    inside_leaf_ns,
)
from phalanx.cluster.placement.request import PlacementRequest, tensor_slots

MOST_BANDS = 6  # heights of bands that are tried
REFINED = 4  # choices for which all of them are tried within leaves
LEAST_TRIES, MOST_SLOTS_COSTED = 24, 1_000_000  # which bound the search
UNKNOWN_TRIES = 2  # of a gang that does not say what it sends
EQUAL_SHARES = (2, 3, 4)  # parts of a gang that pods may get alike
EVEN_UNITS = (2, 4, 8)
NEARLY_PPM = 10_000  # costs this close count as equal: then the less scattered one wins


@dataclass(frozen=True)
class Cells:
    """Places for tensor groups: ``nodes[i]`` are the nodes of cell i, by leaf and pod."""

    nodes: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    leaf: Column
    pod: Column


@dataclass(frozen=True)
class CellOrder:
    """Cells in the order in which they are filled, and the piece of the gang each belongs to."""

    cells: Column
    piece: Column  # consecutive cells of one pod


@dataclass(frozen=True)
class ScoredArrangement:
    """An arrangement and what it costs."""

    cost: Cost
    nodes: Column
    choice: CellOrder

    def order(self) -> tuple[int, int]:
        """Cheapest first."""
        return self.cost.time_ns, self.cost.crossing_bytes


def cells_of(fleet: Fleet, nodes: Column, wide: int, last: Column) -> Cells:
    """Cells of ``wide`` nodes of one domain each; ``last`` sorts within a leaf."""
    columns = fleet.columns
    leaf, pod, domain = columns.leaf[nodes], columns.pod[nodes], columns.domain[nodes]
    if wide == 1:
        order = np.lexsort((nodes, last, leaf, pod))
        ordered = nodes[order]
        return Cells(ordered[:, None], leaf[order], pod[order])
    order = np.lexsort((nodes, last, domain, leaf, pod))
    nodes, domain = nodes[order], domain[order]
    starts = np.flatnonzero(np.diff(domain, prepend=-1))
    counts = np.diff(np.append(starts, len(nodes)))
    within = np.arange(len(nodes)) - np.repeat(starts, counts)
    whole = within < np.repeat(counts // wide * wide, counts)
    grouped = nodes[whole].reshape(-1, wide)
    return Cells(grouped, columns.leaf[grouped[:, 0]], columns.pod[grouped[:, 0]])


def arrange(fleet: Fleet, request: PlacementRequest, cells: Cells) -> tuple[Column, Cost]:
    """Nodes by slot of the cheapest arrangement, and its cost; there must be enough cells."""
    shape, replicas = request.shape, request.replicas
    needed = -(-shape.slots(replicas) // tensor_slots(shape))
    stages = shape.pipeline if needed % shape.pipeline == 0 else 1
    bands = _divisors(stages)
    # Nothing is cheaper than NICs alone: an arrangement that costs no more ends the search.
    enough_ns = _nearly(inside_leaf_ns(request.fabric, shape, replicas))
    tried: list[ScoredArrangement] = []

    most = max(LEAST_TRIES, MOST_SLOTS_COSTED // len(cells.nodes))
    if not shape.traffic:
        most = UNKNOWN_TRIES

    def consider(choice: CellOrder, inner: int) -> bool:
        several = int(choice.piece[-1]) > 0
        for outer in bands[::-1] if several else bands[-1:]:
            if outer % inner == 0:
                nodes = _nodes(cells, choice, stages, needed, outer, inner)
                nodes = nodes[: shape.slots(replicas)]
                cost = cost_of(fleet, request.fabric, shape, replicas, nodes)
                tried.append(ScoredArrangement(cost, nodes, choice))
                if cost.time_ns <= enough_ns or len(tried) >= most:
                    return True
        return False

    if not any(consider(choice, 1) for choice in _choices(cells, request, needed, stages)):
        promising = sorted(tried, key=ScoredArrangement.order)
        choices = list({id(one.choice): one.choice for one in promising}.values())
        any(consider(choice, inner) for choice in choices[:REFINED] for inner in bands[1:])
    least_ns = _nearly(min(one.cost.time_ns for one in tried))
    near = [one for one in tried if one.cost.time_ns <= least_ns]
    best = min(near, key=lambda one: (one.cost.crossing_bytes, one.cost.time_ns))
    return best.nodes, best.cost


def _nearly(time_ns: int) -> int:
    return time_ns + time_ns * NEARLY_PPM // 1_000_000


def _leaf_units(request: PlacementRequest, needed: int) -> list[int]:
    """Numbers of cells that a leaf's border should not cut, besides 1.

    Groups of experts; and powers of two, so that no leaf is left with a single node of a ring.
    """
    groups = flows_of(request.shape, request.replicas)
    wide = tensor_slots(request.shape)
    found = [axis.slots // wide for axis in groups if isinstance(axis, Exchange)]
    found += [unit for unit in EVEN_UNITS if needed % unit == 0]
    return list(dict.fromkeys(unit for unit in found if unit > 1))


def _divisors(stages: int) -> list[int]:
    found = [band for band in range(1, stages + 1) if stages % band == 0]
    middle = found[1:-1][:: max(1, -(-len(found) // MOST_BANDS))]
    return list(dict.fromkeys([found[0], *middle, found[-1]]))


def _choices(
    cells: Cells, request: PlacementRequest, needed: int, stages: int
) -> Iterator[CellOrder]:
    """Ways to spread the gang over pods and leaves, without doubles."""
    seen: dict[bytes, None] = {}
    for leaf_unit in [1, *_leaf_units(request, needed)]:
        # Whole pipelines, anything, whole stages; and equal shares, so that no pod has a few nodes
        # of a ring only, which would have to share a few uplinks.
        shares = [needed // parts for parts in EQUAL_SHARES if needed >= parts * stages]
        for pod_unit in dict.fromkeys([stages, 1, needed // stages, *shares]):
            choice = _choose(cells, needed, pod_unit * leaf_unit, leaf_unit)
            key = choice.cells.tobytes()
            if key not in seen:
                seen[key] = None
                yield choice


def _choose(cells: Cells, needed: int, pod_unit: int, leaf_unit: int) -> CellOrder:
    _, starts = np.unique(cells.pod, return_index=True)
    sizes = np.diff(np.append(starts, len(cells.pod))).tolist()
    pieces = fill(sizes, needed, pod_unit)
    wanted: dict[int, int] = {}
    for pod, count in pieces:
        wanted[pod] = wanted.get(pod, 0) + count
    ordered: dict[int, Column] = {}
    for pod, count in wanted.items():
        begin = int(starts[pod])
        leaf = cells.leaf[begin : begin + sizes[pod]]
        ordered[pod] = begin + _leaves(leaf, count, leaf_unit)
    taken: list[Column] = []
    for pod, count in pieces:
        taken.append(ordered[pod][:count])
        ordered[pod] = ordered[pod][count:]
    counts = [count for _, count in pieces]
    piece = np.repeat(np.arange(len(pieces), dtype=np.int64), counts)
    return CellOrder(np.concatenate(taken), piece)


def _leaves(leaf: Column, needed: int, unit: int) -> Column:
    """Cells of one pod (given by leaf, sorted), in the order of use."""
    starts = np.flatnonzero(np.diff(leaf, prepend=-1))
    sizes = np.diff(np.append(starts, len(leaf)))
    used = [0] * len(starts)
    leaves: list[Column] = []
    for number, count in fill(sizes.tolist(), needed, unit):
        first = int(starts[number]) + used[number]
        leaves.append(np.arange(first, first + count))
        used[number] += count
    return np.concatenate(leaves)


def fill(sizes: Sequence[int], needed: int, unit: int) -> list[tuple[int, int]]:
    """(place, how many) in order of use: as few places as can be, whole units first.

    One place that is just large enough; or the largest ones, and for the rest the smallest that
    holds it. What whole units cannot cover is topped up from what they left.
    """
    filled: list[tuple[int, int]] = []
    left = needed
    caps = sorted(((size // unit * unit, -place) for place, size in enumerate(sizes)), reverse=True)
    position = 0
    while left and position < len(caps) and caps[position][0]:
        if caps[position][0] >= left:
            # The smallest of those that are large enough; of equals, the first place.
            end = position
            while end + 1 < len(caps) and caps[end + 1][0] >= left:
                end += 1
            while end > position and caps[end - 1][0] == caps[end][0]:
                end -= 1
            filled.append((-caps[end][1], left))
            return filled
        filled.append((-caps[position][1], caps[position][0]))
        left -= caps[position][0]
        position += 1
    if left:
        rests = sorted((-(size % unit), place) for place, size in enumerate(sizes))
        for rest, place in rests:
            count = min(left, -rest)
            if count:
                filled.append((place, count))
                left -= count
    return filled


def _nodes(
    cells: Cells, choice: CellOrder, stages: int, needed: int, outer: int, inner: int
) -> Column:
    """Nodes by slot: pieces take bands of ``outer`` stages, leaves in them bands of ``inner``."""
    columns = needed // stages
    position = np.arange(needed, dtype=np.int64)
    inside = position % (outer * columns)
    stage = position // (outer * columns) * outer + inside % outer
    column = inside // outer
    if inner != outer:
        order = np.lexsort((stage % inner, column, stage // inner, choice.piece))
        stage, column = stage[order], column[order]
    where = np.empty(needed, np.int64)
    where[stage * columns + column] = choice.cells
    return cells.nodes[where].reshape(-1)
