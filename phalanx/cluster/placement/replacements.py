"""Which node takes the place of a lost one: the one that is predicted to cost its gang least.

Pure: reads the fleet, changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from msgspec import Struct

from phalanx.cluster.fleet.columns import Column
from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.node import NodeState
from phalanx.cluster.placement.communication import Flows, flows_of
from phalanx.cluster.placement.free_index import array_of, free_index_of, with_host_capacity
from phalanx.cluster.placement.request import PlacementRequest, tensor_slots
from phalanx.cluster.units import MILLION

Wanted = tuple[int, tuple[int, ...]]  # a slot, and nodes whose failure domains it had better avoid


class NodePrices(Struct, frozen=True, kw_only=True):
    """What nodes of the fleet would cost a gang, in nanoseconds in which all of it stands still."""

    cold_ns: int  # workers that must be started, over those that stand by
    failures_ns: Column  # by node: its failures to come
    # The same where it shares a rack, feed or switch with the other copy of its snapshot.
    both_copies_ns: Column
    steps: int  # for as many of which a longer step counts
    alike_ns: int  # what differs by less is the same


def replacements(
    fleet: Fleet,
    request: PlacementRequest,
    wanted: Sequence[Wanted],
    prices: NodePrices | None = None,
) -> tuple[tuple[int, int], ...]:
    """(slot, node) for slots of a placed gang, for as many as there are nodes.

    Each gets the node that costs least. Of equals: one of the job's own spares (those with started
    workers first), of the pool's, or a free node; then the one on which the slot's own traffic is
    nearest. The spare that keeps the job's snapshots goes before all, lemons come last. A tensor
    group that lies across nodes must stay within its NVLink domain. Without ``prices`` all nodes
    fail alike.
    """
    groups = [
        _CandidateGroup(fleet, request, number, nodes, prices)
        for number, nodes in enumerate(candidates(fleet, request))
        if len(nodes)
    ]
    least_ns = min((int(group.price_ns.min()) for group in groups), default=0)
    for group in groups:
        group.price_ns -= least_ns
        group.find_least()
    pairs = []
    for slot, apart in wanted:
        best: tuple[tuple[int, ...], int] | None = None
        for group in groups:
            # A group whose least price is no better than what was found is not looked at.
            if best is None or group.least < best[0][:3]:
                found = group.cheapest(slot, apart)
                best = found if best is None or (found and found < best) else best
        if best is None:
            break
        for group in groups:
            group.take(best[1])
        pairs.append((slot, best[1]))
    return tuple(pairs)


def candidates(fleet: Fleet, request: PlacementRequest) -> list[Column]:
    """Nodes that could replace others, the groups in the order in which equals are used."""
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
    warm = np.isin(own, np.asarray(request.warm, np.int64))
    pool = np.flatnonzero(spare & (columns.spare_for == 0))
    free = free_index.with_free(classes, request.shape.slot_gpus) & ~request.closed
    if request.shape.whole_nodes:
        free &= free_index.idle
    idle = with_host_capacity(fleet, array_of(free, len(fleet)), request.shape)
    keeps = own == request.backup
    return [own[keeps], own[warm & ~keeps], own[~warm & ~keeps], pool, idle[able[idle]]]


POOL = 3  # of these groups: the fleet's spares
WARM = 2  # and those before this one have started workers


class _CandidateGroup:
    """Candidates that are used alike."""

    def __init__(
        self,
        fleet: Fleet,
        request: PlacementRequest,
        number: int,
        nodes: Column,
        prices: NodePrices | None,
    ) -> None:
        self._fleet, self._request, self._prices = fleet, request, prices
        self._number, self._nodes = number, nodes
        self.least = (0, 0, 0)
        worse = np.zeros(len(fleet), np.int64)
        worse[array_of(free_index_of(fleet).worse, len(fleet))] = 1
        self._worse = worse[nodes]
        self.price_ns = np.zeros(len(nodes), np.int64)
        if prices is not None:
            cold_ns = prices.cold_ns if number >= WARM else 0
            self.price_ns = prices.failures_ns[nodes] + cold_ns

    def find_least(self) -> None:
        """The least that any of them could have in the order of choice."""
        if len(self._nodes):
            alike_ns = self._prices.alike_ns if self._prices is not None else 1
            level = int(self.price_ns.min()) // alike_ns
            self.least = (int(self._number > 0), int(self._worse.min()), level)

    def take(self, node: int) -> None:
        """One of them is used."""
        left = self._nodes != node
        if not left.all():
            self._nodes, self._worse = self._nodes[left], self._worse[left]
            self.price_ns = self.price_ns[left]
            self.find_least()

    def cheapest(self, slot: int, apart: tuple[int, ...]) -> tuple[tuple[int, ...], int] | None:
        """The best for a slot, with what decides between it and those of other groups."""
        fleet, request = self._fleet, self._request
        able = _in_domain(fleet, request, slot, self._nodes)
        if not len(able):
            return None
        nodes, worse, price_ns = self._nodes[able], self._worse[able], self.price_ns[able]
        shares = np.zeros(len(nodes), np.bool_)
        for place in (fleet.columns.rack, fleet.columns.power, fleet.columns.switch):
            for other in apart:
                shares |= place[nodes] == place[other]
        far, slower_ns = _traffic(fleet, request, slot, nodes)
        level = price_ns
        if self._prices is not None:
            prices = self._prices
            beside_ns = prices.both_copies_ns[nodes] - prices.failures_ns[nodes]
            price_ns = price_ns + shares * beside_ns + slower_ns * prices.steps
            level = price_ns // prices.alike_ns
        # Whatever takes a node must leave the copy of its snapshot: that goes before near.
        first = int(np.lexsort((nodes, far, shares, level, worse))[0])
        key = (int(self._number > 0), int(worse[first]), int(level[first]), self._number)
        return key, int(nodes[first])


def _in_domain(fleet: Fleet, request: PlacementRequest, slot: int, nodes: Column) -> Column:
    """Which of some nodes a slot may have, as indices."""
    wide = tensor_slots(request.shape)
    if wide <= 1 or not request.keep:
        return np.arange(len(nodes))
    first = slot // wide * wide
    others = [n for i, n in enumerate(request.keep[first : first + wide]) if first + i != slot]
    return np.flatnonzero(fleet.columns.domain[nodes] == fleet.columns.domain[others[0]])


@lru_cache(maxsize=4)
def _column(nodes: tuple[int, ...]) -> Column:
    """The nodes of a large gang are asked about once for every node that it lost."""
    found = np.asarray(nodes, np.int64)
    found.flags.writeable = False
    return found


def _traffic(
    fleet: Fleet, request: PlacementRequest, slot: int, able: Column
) -> tuple[Column, Column]:
    """What the traffic of one slot would cost on each of some nodes.

    Relative, to choose between equals; and by how much steps become longer, where it is known what
    ranks send: what the slot sends above its leaf and its pod, beyond the time its NICs need.
    """
    far, slower_ns = np.zeros(len(able), np.int64), np.zeros(len(able), np.int64)
    if not request.keep or not request.shape.slot_gpus:
        return far, slower_ns
    columns, fabric = fleet.columns, request.fabric
    keep = _column(request.keep)
    leaf_cost = fabric.leaf_oversubscription_ppm
    pod_cost = max(fabric.pod_oversubscription_ppm, leaf_cost)
    per_us = request.shape.slot_gpus * fabric.nic_bytes_per_second // MILLION
    for axis in flows_of(request.shape, request.replicas):
        if isinstance(axis, Flows):
            peers, ranks = axis.of_slot(slot)
            weight = axis.sent_bytes >> 20
        else:
            first = slot // axis.slots * axis.slots
            peers = np.delete(np.arange(first, first + axis.slots), slot - first)
            weight, ranks = axis.sent_bytes // axis.slots >> 20, axis.slot_gpus
        crossing, above = np.zeros(len(able), np.int64), np.zeros(len(able), np.int64)
        there = keep[peers[peers < len(keep)]].tolist()
        for peer in there:
            apart = columns.domain[able] != columns.domain[peer]
            crosses = columns.leaf[able] != columns.leaf[peer]
            leaves = columns.pod[able] != columns.pod[peer]
            far += apart * weight
            far += crosses * (weight * leaf_cost // MILLION + 1)
            far += leaves * (weight * pod_cost // MILLION + 1)
            crossing += crosses
            above += leaves
        if request.shape.traffic and there:
            sent_ns = ranks * axis.sent_bytes * 1000 // per_us
            for place, count, cost in (
                (columns.leaf, crossing, leaf_cost),
                (columns.pod, above, pod_cost),
            ):
                beside = 1 + np.bincount(place[keep], minlength=int(place.max()) + 1)[place[able]]
                up_ns = sent_ns * count // len(there) * cost // MILLION // beside
                slower_ns += np.maximum(0, up_ns - sent_ns)
    return far, slower_ns
