"""Nodes kept free to replace others: how many, and which ones."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from phalanx.cluster.fleet.columns import Column
from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.node import NodeState
from phalanx.cluster.placement.free_index import Nodes, array_of
from phalanx.cluster.policy import SparePolicy
from phalanx.cluster.units import MILLION
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
    spares = shares // total
    order = np.lexsort((np.arange(len(sizes)), -(shares % total)))
    spares[order[: policy.nodes - int(spares.sum())]] += 1
    return spares


def _nth(group: Column) -> Column:
    """How many before each one stand in the same place; places must be sorted."""
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    counts = np.diff(np.append(starts, len(group)))
    return np.arange(len(group)) - np.repeat(starts, counts)
