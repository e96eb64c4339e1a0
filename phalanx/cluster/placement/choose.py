"""Where a gang goes: all of it, or nothing.

``place`` is pure: it reads the fleet and changes nothing. The order of the nodes it returns is the
order of ranks.
"""

from __future__ import annotations

import numpy as np
from msgspec import structs

from phalanx.cluster.fleet.columns import Column
from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.jobs.job import GangShape, Placement
from phalanx.cluster.node import lowest_bits
from phalanx.cluster.placement.arrange import Cells, arrange, cells_of
from phalanx.cluster.placement.communication import cost_of, inside_leaf_ns
from phalanx.cluster.placement.constraints import unknown
from phalanx.cluster.placement.defragment import defragment
from phalanx.cluster.placement.free_index import (
    FreeIndex,
    Nodes,
    array_of,
    free_index_of,
    set_of_nodes,
    with_host_capacity,
)
from phalanx.cluster.placement.request import (
    PlacementRefusal,
    PlacementRequest,
    held_by,
    request_of,
    tensor_slots,
)
from phalanx.cluster.reasons import Reason, reason

__all__ = [
    "PlacementRefusal",
    "PlacementRequest",
    "defragment",
    "held_by",
    "place",
    "request_of",
]


def place(fleet: Fleet, request: PlacementRequest) -> Placement | PlacementRefusal:
    """A place for the whole gang on free GPUs of healthy nodes, or why there is none."""
    shape = request.shape
    wide = tensor_slots(shape)
    if not wide:
        facts = {"tensor": shape.tensor, "slot_gpus": shape.slot_gpus}
        return PlacementRefusal(reason("tensor_across_slots", **facts))
    free_index = free_index_of(fleet)
    classes = free_index.suiting(shape, request.constraint, request.partition, request.barred)
    closed = request.closed | set_of_nodes(request.avoid)
    if shape.slots(request.replicas) == 1 and not request.spares:
        best = None
        if request.holders:
            best = free_index.best_fit(shape, classes, closed | ~request.holders)
        if best is None:
            best = free_index.best_fit(shape, classes, closed)
        if best is None:
            return _refusal(fleet, free_index, request, classes, 0)
        mask = lowest_bits(fleet.free_mask(best), shape.slot_gpus)
        return Placement((best,), (mask,), replicas=request.replicas, reason=_placed(1, 1, 1))
    able = _with_capacity(free_index, request, classes, closed)
    nodes = with_host_capacity(fleet, array_of(able, len(fleet)), shape)
    needed = -(-shape.slots(request.replicas) // wide)
    worse = np.zeros(len(nodes), np.int64)
    if able & free_index.worse:
        worse = _flags(free_index.worse, len(fleet))[nodes]
        if int((worse == 0).sum()) >= needed * wide + request.spares:
            keep = worse == 0
            nodes, worse = nodes[keep], worse[keep]
    # Within a leaf: lemons last, and the fullest nodes first, so that empty ones stay whole.
    last = worse * 64 + fleet.columns.free_gpus[nodes]
    cells = cells_of(fleet, nodes, wide, last)
    if len(cells.nodes) < needed:
        return _refusal(fleet, free_index, request, classes, len(cells.nodes))
    if request.holders:
        among = _with_memory(fleet, request, nodes, last, needed * wide)
        with_memory = cells_of(fleet, nodes[among], wide, last[among])
        if len(with_memory.nodes) >= needed:
            cells = with_memory
    chosen, cost_ns = _choose(fleet, request, cells, needed)
    return _placement(fleet, request, chosen, cost_ns, nodes)


def nodes_with_capacity(fleet: Fleet, request: PlacementRequest) -> int:
    """How many nodes have free GPUs for a slot; ``place`` refuses gangs that need more."""
    free_index = free_index_of(fleet)
    classes = free_index.suiting(
        request.shape, request.constraint, request.partition, request.barred
    )
    closed = request.closed | set_of_nodes(request.avoid)
    return _with_capacity(free_index, request, classes, closed).bit_count()


def _with_memory(
    fleet: Fleet, request: PlacementRequest, nodes: Column, last: Column, count: int
) -> Column:
    """Which of some nodes to take so that most of them have the job's memory: as indices.

    The others are those that stand nearest to these: in the same leaves, then in the same pods.
    """
    columns = fleet.columns
    without = 1 - _flags(request.holders, len(fleet))[nodes]
    mine = nodes[without == 0]
    leaf = ~np.isin(columns.leaf[nodes], columns.leaf[mine])
    pod = ~np.isin(columns.pod[nodes], columns.pod[mine])
    return np.sort(np.lexsort((nodes, last, leaf, pod, without))[:count])


def _with_capacity(
    free_index: FreeIndex, request: PlacementRequest, classes: tuple[int, ...], closed: Nodes
) -> Nodes:
    """Nodes with GPUs for a slot."""
    shape = request.shape
    able = free_index.with_free(classes, shape.slot_gpus)
    if shape.whole_nodes:
        able &= free_index.idle
    for number in classes if request.own else ():
        able |= free_index.members[number] & request.own
    return able & ~closed


def _choose(
    fleet: Fleet, request: PlacementRequest, cells: Cells, needed: int
) -> tuple[Column, int]:
    """Nodes by slot, and what their communication costs."""
    shape, replicas = request.shape, request.replicas
    counts = np.bincount(cells.leaf)
    enough = np.flatnonzero(counts >= needed)
    has_traffic = bool(shape.traffic)
    if not len(enough):
        nodes, cost = arrange(fleet, request, cells)
        return nodes, cost.time_ns if has_traffic else 0
    # The tightest leaf; of equals, the first.
    leaf = int(enough[np.argmin(counts[enough])])
    first = int(np.flatnonzero(cells.leaf == leaf)[0])
    nodes = cells.nodes[first : first + needed].reshape(-1)[: shape.slots(replicas)]
    if not has_traffic:
        return nodes, 0
    domains = fleet.columns.domain[nodes]
    if len(np.unique(domains)) == len(nodes) and not fleet.columns.rails_down[nodes].any():
        return nodes, inside_leaf_ns(request.fabric, shape, replicas)
    return nodes, cost_of(fleet, request.fabric, shape, replicas, nodes).time_ns


def _placement(
    fleet: Fleet, request: PlacementRequest, chosen: Column, cost_ns: int, able_nodes: Column
) -> Placement:
    """The gang on its nodes, with as many of its spares as there are; others come when they can."""
    columns, shape = fleet.columns, request.shape
    spares: tuple[int, ...] = ()
    if request.spares:
        left = np.setdiff1d(able_nodes, chosen)
        left = left[[not fleet.held[node] for node in left.tolist()]]
        spares = _near(columns.pod, chosen, left, min(request.spares, len(left)))
    leaves, pods = len(np.unique(columns.leaf[chosen])), len(np.unique(columns.pod[chosen]))
    return Placement(
        nodes=tuple(chosen.tolist()),
        gpus=_masks(fleet, shape, chosen),
        spares=spares,
        replicas=request.replicas,
        cost_ns=cost_ns,
        reason=_placed(len(chosen), leaves, pods),
    )


def _masks(fleet: Fleet, shape: GangShape, nodes: Column) -> tuple[int, ...]:
    """GPUs of each slot: the same ones everywhere if they can be, so that they share rails."""
    count = shape.slot_gpus
    if count and bool((fleet.columns.gpus[nodes] == count).all()):
        return ()
    free = fleet.columns.free_mask[nodes]
    common = int(np.bitwise_and.reduce(free))
    if common.bit_count() >= count:
        return (lowest_bits(common, count),) * len(nodes)
    return tuple(lowest_bits(mask, count) for mask in free.tolist())


def _near(pod: Column, chosen: Column, left: Column, count: int) -> tuple[int, ...]:
    """Spares from the pods in which the gang stands, in proportion to its nodes there."""
    mine = np.bincount(pod[chosen], minlength=int(pod.max()) + 1)
    order = np.argsort(pod[left], kind="stable")
    left = left[order]
    starts = np.flatnonzero(np.diff(pod[left], prepend=-1))
    counts = np.diff(np.append(starts, len(left)))
    nth = np.arange(len(left)) - np.repeat(starts, counts)
    # The k-th spare of a pod with n nodes is as urgent as the k/n-th of another.
    urgency = (nth + 1) * len(chosen) * 1000 // np.maximum(1, mine[pod[left]])
    urgency[mine[pod[left]] == 0] = np.iinfo(np.int64).max
    return tuple(sorted(left[np.lexsort((left, urgency))[:count]].tolist()))


def _placed(nodes: int, leaves: int, pods: int) -> Reason:
    return reason("placed", nodes=nodes, leaves=leaves, pods=pods)


def _no_capacity(request: PlacementRequest, free: int) -> Reason:
    shape = request.shape
    wanted, wide = shape.slots(request.replicas), tensor_slots(shape)
    if wide > 1:
        return reason("no_domain_room", wanted=wanted // wide, wide=wide, free=free)
    if wanted == 1:
        return reason("no_room_one", gpus=shape.slot_gpus)
    return reason("no_room", wanted=wanted, gpus=shape.slot_gpus, free=free)


def _refusal(
    fleet: Fleet,
    free_index: FreeIndex,
    request: PlacementRequest,
    classes: tuple[int, ...],
    free: int,
) -> PlacementRefusal:
    """Why there is no room, and whether there could ever be."""
    never = never_fits(fleet, free_index, request, classes)
    return PlacementRefusal(never or _no_capacity(request, free))


def never_fits(
    fleet: Fleet, free_index: FreeIndex, request: PlacementRequest, classes: tuple[int, ...]
) -> Reason | None:
    """Why a gang would have no place even if the fleet were empty and all of it healthy."""
    shape = request.shape
    if not len(fleet):
        return reason("no_nodes")
    if not classes:
        features = dict.fromkeys(word for known in fleet.classes for word in known.features)
        strange = unknown(request.constraint, list(features))
        if strange:
            return reason("no_such_feature", words="; ".join(strange))
        return reason("no_such_nodes", wish=_wish(request))
    members = 0
    for number in classes:
        members |= free_index.members[number]
    wide, wanted = tensor_slots(shape), shape.slots(request.replicas)
    if wide == 1:
        fitting, needed = members.bit_count(), wanted + request.spares
        if fitting < needed:
            facts = {"wanted": needed, "gpus": shape.slot_gpus, "fitting": fitting}
            return reason("fleet_too_small", **facts)
        return None
    nodes = array_of(members, len(fleet))
    groups = int((np.bincount(fleet.columns.domain[nodes]) // wide).sum())
    if groups * wide >= wanted and len(nodes) >= wanted + request.spares:
        return None
    facts = {"wanted": -(-wanted // wide), "wide": wide, "tensor": shape.tensor, "fitting": groups}
    return reason("domains_too_small", **facts)


def _wish(request: PlacementRequest) -> str:
    shape = request.shape
    parts = [f"{shape.slot_gpus} GPUs", f"{shape.slot_cpus} CPUs"]
    if shape.slot_memory_bytes:
        parts.append(f"{shape.slot_memory_bytes / 2**30:.0f} GiB of memory")
    if request.constraint:
        parts.append("the constraint")
    if request.partition:
        parts.append(f"partition {request.partition}")
    return ", ".join(parts)


def _flags(nodes: Nodes, size: int) -> Column:
    flags = np.zeros(size, np.int64)
    flags[array_of(nodes, size)] = 1
    return flags


def place_elastic(fleet: Fleet, request: PlacementRequest) -> Placement | None:
    """A place for all replicas, or for as many as there is room for, if the gang is elastic."""
    shape = request.shape
    if nodes_with_capacity(fleet, request) < shape.slots(min(shape.floor, request.replicas)):
        return None  # so nearly always; why there is no place is not asked
    placement = place(fleet, request)
    if isinstance(placement, Placement):
        return placement
    best: Placement | None = None
    low, high = shape.floor, request.replicas - 1
    while low <= high:
        # First whether the fewest fit; then how many more do.
        middle = (low + high + 1) // 2 if best else low
        placement = place(fleet, structs.replace(request, replicas=middle))
        if isinstance(placement, Placement):
            best, low = placement, middle + 1
        elif best is None:
            return None
        else:
            high = middle - 1
    return best
