"""Nodes kept free to replace others: how many, which ones, and which one for a slot."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from phalanx.cluster.fleet.columns import Column
from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.fleet.node import NodeState
from phalanx.cluster.placement.communication import Flows, flows_of
from phalanx.cluster.placement.free_index import Nodes, array_of, free_index_of, with_host_capacity
from phalanx.cluster.placement.request import PlacementRequest, tensor_slots
from phalanx.cluster.policy import MILLION, SparePolicy
from phalanx.plan.cost.failures import spare_units


@lru_cache(maxsize=256)
def spares_needed(nodes: int, down_ppm: int, quantile_ppm: int) -> int:
    """Of this many nodes, how many to keep free so that the others are replaced in time.

    The fewest k such that, with the given probability, at most k of all are away at a moment.
    """
    if nodes < 2 or down_ppm <= 0:
        return 0
    down, quantile = min(down_ppm, MILLION - 1) / MILLION, quantile_ppm / MILLION
    most = spare_units(nodes, down, quantile)
    return min(nodes - 1, spare_units(max(1, nodes - most), down, quantile))


def spare_nodes(fleet: Fleet, policy: SparePolicy, closed: Nodes = 0) -> tuple[int, ...]:
    """Nodes that the fleet's pool of spares should hold now, those it has included.

    They are spread over racks, and taken from leaves with few idle nodes: a hole is no loss there.
    What is promised to jobs (``closed``) is left alone.
    """
    columns = fleet.columns
    state = columns.state
    pool = (state == NodeState.SPARE) & (columns.spare_for == 0)
    if policy.nodes == 0:
        return ()
    domain = _domains(fleet, policy)
    wanted = _wanted(domain, policy)
    idle = (state == NodeState.HEALTHY) & (columns.free_gpus == columns.gpus) & (columns.gpus > 0)
    idle &= (
        columns.free_cpus
        == np.asarray([known.cpus for known in fleet.classes], np.int64)[columns.node_class]
    )
    idle[array_of(closed, len(fleet))] = False
    able = np.flatnonzero(pool | idle)
    if not len(able):
        return ()
    in_leaf = np.bincount(columns.leaf[np.flatnonzero(idle)], minlength=len(fleet.places["leaf"]))
    # Those it has stay; then one a rack, before any rack gives a second one.
    fresh = (~pool[able]).astype(np.int64)
    order = np.lexsort((able, in_leaf[columns.leaf[able]], fresh, columns.rack[able]))
    able = able[order]
    nth = _nth(columns.rack[able])
    fresh = (~pool[able]).astype(np.int64)
    order = np.lexsort((able, in_leaf[columns.leaf[able]], nth, fresh, domain[able]))
    able = able[order]
    return tuple(sorted(able[_nth(domain[able]) < wanted[domain[able]]].tolist()))


def is_full(fleet: Fleet, policy: SparePolicy) -> bool:
    """Whether every domain has the spares that it should have."""
    columns = fleet.columns
    pool = np.flatnonzero((columns.state == NodeState.SPARE) & (columns.spare_for == 0))
    domain = _domains(fleet, policy)
    wanted = _wanted(domain, policy)
    return bool((np.bincount(domain[pool], minlength=len(wanted)) >= wanted).all())


def wanted_spares(fleet: Fleet, policy: SparePolicy) -> int:
    """Nodes that the pool should have."""
    return int(_wanted(_domains(fleet, policy), policy).sum()) if len(fleet) else 0


def _domains(fleet: Fleet, policy: SparePolicy) -> Column:
    """For each node: the part of the fleet whose spares it could be one of."""
    if policy.per == "fleet":
        return np.zeros(len(fleet), np.int64)
    found: Column = getattr(fleet.columns, policy.per)
    return found


def _wanted(domain: Column, policy: SparePolicy) -> Column:
    """Spares of each domain."""
    sizes = np.bincount(domain)
    if policy.nodes < 0:
        needed = [spares_needed(n, policy.down_ppm, policy.quantile_ppm) for n in sizes.tolist()]
        return np.asarray(needed, np.int64)
    # A given number is divided by size, the remainder to the largest remainders.
    shares, total = policy.nodes * sizes, int(sizes.sum())
    found = shares // total
    order = np.lexsort((np.arange(len(sizes)), -(shares % total)))
    found[order[: policy.nodes - int(found.sum())]] += 1
    return found


def _nth(place: Column) -> Column:
    """How many before each one stand in the same place; places must be sorted."""
    starts = np.flatnonzero(np.diff(place, prepend=-1))
    counts = np.diff(np.append(starts, len(place)))
    return np.arange(len(place)) - np.repeat(starts, counts)


Wanted = tuple[int, tuple[int, ...]]  # a slot, and nodes whose failure domains it had better avoid


def replacements(
    fleet: Fleet, request: PlacementRequest, wanted: Sequence[Wanted]
) -> tuple[tuple[int, int], ...]:
    """(slot, node) for slots of a placed gang, for as many as there are nodes.

    Each gets one of the job's own spares (the one that keeps its snapshots first, then those with
    started workers), of the pool's, or a free node; of these, the one on which the slot's own
    traffic costs least. A tensor group that lies across nodes must stay within its NVLink domain.
    """
    groups = _candidates(fleet, request)
    worse = np.zeros(len(fleet), np.int64)
    worse[array_of(free_index_of(fleet).worse, len(fleet))] = 1
    pairs = []
    for slot, apart in wanted:
        for number, nodes in enumerate(groups):
            able = _in_domain(fleet, request, slot, nodes)
            if len(able):
                best = _nearest(fleet, request, slot, able, worse, apart)
                groups[number] = nodes[nodes != best]
                pairs.append((slot, best))
                break
        else:
            break
    return tuple(pairs)


def _candidates(fleet: Fleet, request: PlacementRequest) -> list[Column]:
    """Nodes that could replace others, the groups in the order in which they are used."""
    columns = fleet.columns
    free_index = free_index_of(fleet)
    classes = free_index.suiting(
        request.shape, request.constraint, request.partition, request.barred
    )
    suits = np.zeros(len(fleet.classes), np.bool_)
    suits[list(classes)] = True
    able = suits[columns.node_class]
    able[np.asarray((*request.avoid, *request.keep), np.int64)] = False
    spare = able & (columns.state == NodeState.SPARE)
    own = np.flatnonzero(spare & (columns.spare_for == request.job))
    started = [fleet.since_ns(node) <= request.warm_since_ns for node in own.tolist()]
    warm = np.asarray(started, np.bool_)
    pool = np.flatnonzero(spare & (columns.spare_for == 0))
    free = free_index.with_free(classes, request.shape.slot_gpus) & ~request.closed
    if request.shape.whole_nodes:
        free &= free_index.idle
    idle = with_host_capacity(fleet, array_of(free, len(fleet)), request.shape)
    keeps = own == request.backup
    return [own[keeps], own[warm & ~keeps], own[~warm & ~keeps], pool, idle[able[idle]]]


def _in_domain(fleet: Fleet, request: PlacementRequest, slot: int, nodes: Column) -> Column:
    wide = tensor_slots(request.shape)
    if wide <= 1 or not request.keep:
        return nodes
    first = slot // wide * wide
    others = [n for i, n in enumerate(request.keep[first : first + wide]) if first + i != slot]
    found: Column = nodes[fleet.columns.domain[nodes] == fleet.columns.domain[others[0]]]
    return found


@lru_cache(maxsize=4)
def _column(nodes: tuple[int, ...]) -> Column:
    """The nodes of a large gang are asked about once for every node that it lost."""
    found = np.asarray(nodes, np.int64)
    found.flags.writeable = False
    return found


def _nearest(
    fleet: Fleet,
    request: PlacementRequest,
    slot: int,
    nodes: Column,
    worse: Column,
    apart: tuple[int, ...],
) -> int:
    far = _distance(fleet, request, slot, nodes)
    # Whatever takes a node must leave the copy of its snapshot: that goes before near.
    shares = np.zeros(len(nodes), np.bool_)
    for place in (fleet.columns.rack, fleet.columns.power, fleet.columns.switch):
        for other in apart:
            shares |= place[nodes] == place[other]
    return int(nodes[np.lexsort((nodes, far, shares, worse[nodes]))[0]])


def _distance(fleet: Fleet, request: PlacementRequest, slot: int, able: Column) -> Column:
    """What the traffic of one slot would cost on each of some nodes (relative)."""
    far = np.zeros(len(able), np.int64)
    if not request.keep:
        return far
    columns, fabric = fleet.columns, request.fabric
    keep = _column(request.keep)
    leaf_cost = fabric.leaf_oversubscription_ppm
    pod_cost = max(fabric.pod_oversubscription_ppm, leaf_cost)
    for axis in flows_of(request.shape, request.replicas):
        if isinstance(axis, Flows):
            out, back = axis.source == slot, axis.target == slot
            peers = np.concatenate((axis.target[out], axis.source[back]))
            weight = axis.sent_bytes >> 20
        else:
            first = slot // axis.slots * axis.slots
            peers = np.delete(np.arange(first, first + axis.slots), slot - first)
            weight = axis.sent_bytes // axis.slots >> 20
        for peer in keep[peers[peers < len(keep)]].tolist():
            apart = columns.domain[able] != columns.domain[peer]
            crosses = columns.leaf[able] != columns.leaf[peer]
            above = columns.pod[able] != columns.pod[peer]
            far += apart * weight
            far += crosses * (weight * leaf_cost // MILLION + 1)
            far += above * (weight * pod_cost // MILLION + 1)
    return far
