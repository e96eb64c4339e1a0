"""What a gang's communication costs on some nodes: bytes of each axis over the links they load.

Every rank of an axis sends to its neighbour (a ring or a pipeline) or to all others (experts).
Bytes that leave an NVLink domain load the node's NICs, those that leave a leaf or a pod its
uplinks too, of which the gang counts on the share of its own GPUs below them. An axis takes as
long as its most loaded link; a step, the sum of its axes. All in integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from phalanx.cluster.fleet.columns import Column
from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.jobs.job import GangShape
from phalanx.cluster.policy import FabricPolicy
from phalanx.cluster.units import MILLION
from phalanx.plan.cost.traffic import AxisTraffic

# What to assume of a gang that says nothing: gradients weigh more than activations.
NOMINAL_BYTES = {"tensor": 1 << 34, "context": 1 << 33, "data": 1 << 33, "pipeline": 1 << 29}


@dataclass(frozen=True)
class Flows:
    """Who sends to whom along one axis, slot by slot: ``count`` ranks, ``sent_bytes`` each."""

    axis: str
    sent_bytes: int
    source: Column
    target: Column
    count: Column

    def of_slot(self, slot: int) -> tuple[Column, int]:
        """Whom a slot sends to and hears from, and how many of its ranks send."""
        out, back = (order[_span(ends, slot)] for order, ends in self._sorted)
        return np.concatenate((self.target[out], self.source[back])), int(self.count[out].sum())

    @cached_property
    def _sorted(self) -> list[tuple[Column, Column]]:
        """By sender and by receiver: flows in that order, and where they end."""
        orders = [(end, np.argsort(end, kind="stable")) for end in (self.source, self.target)]
        return [(order, end[order]) for end, order in orders]


def _span(ends: Column, slot: int) -> slice:
    """Where a slot's flows stand among sorted ones."""
    return slice(int(np.searchsorted(ends, slot)), int(np.searchsorted(ends, slot, "right")))


@dataclass(frozen=True)
class Exchange:
    """All ranks of a group send to all: slots of one group, ``slots`` of them in each."""

    sent_bytes: int  # by one rank
    slots: int
    slot_gpus: int


@dataclass(frozen=True)
class Cost:
    """Of one step: predicted time, and bytes above leaves (which decides between equals)."""

    time_ns: int
    crossing_bytes: int


@lru_cache(maxsize=512)
def flows_of(shape: GangShape, replicas: int) -> tuple[Flows | Exchange, ...]:
    """Everything that leaves a slot of a gang."""
    exchanges: list[Flows | Exchange] = []
    if not shape.slot_gpus:
        return ()
    for axis in shape.traffic or _nominal(shape, replicas):
        if axis.axis == "expert":
            if axis.ranks > shape.slot_gpus and axis.ranks % shape.slot_gpus == 0:
                slots = axis.ranks // shape.slot_gpus
                exchanges.append(Exchange(int(axis.sent_bytes), slots, shape.slot_gpus))
            continue
        flows = _ring(shape, replicas, axis)
        if len(flows.source):
            exchanges.append(flows)
    return tuple(exchanges)


def cost_of(
    fleet: Fleet, fabric: FabricPolicy, shape: GangShape, replicas: int, nodes: Column
) -> Cost:
    """The cost of a gang on these nodes, given by slot."""
    if len(nodes) < 2:
        return Cost(0, 0)
    links = _Links(fleet, fabric, shape, nodes)
    time_ns = crossing = 0
    for axis in flows_of(shape, replicas):
        if isinstance(axis, Exchange):
            spent, crossed = links.exchange(axis)
        else:
            spent, crossed = links.flows(axis)
        time_ns += spent
        crossing += crossed
    return Cost(time_ns, crossing)


def inside_leaf_ns(fabric: FabricPolicy, shape: GangShape, replicas: int) -> int:
    """The cost of a gang whose nodes all share a leaf and no NVLink domain."""
    return _inside_leaf(fabric, shape, replicas)


@lru_cache(maxsize=512)
def _inside_leaf(fabric: FabricPolicy, shape: GangShape, replicas: int) -> int:
    time_ns = 0
    nic = fabric.nic_bytes_per_second * shape.slot_gpus
    for axis in flows_of(shape, replicas):
        if isinstance(axis, Exchange):
            load = axis.sent_bytes * shape.slot_gpus * (axis.slots - 1) // axis.slots
        else:
            load = int(np.bincount(axis.source, axis.count).max()) * axis.sent_bytes
        time_ns += load * 10**9 // nic + fabric.hop_ns
    return time_ns


class _Links:
    """The links below and above a gang's nodes, and how loaded an axis makes them."""

    def __init__(self, fleet: Fleet, fabric: FabricPolicy, shape: GangShape, nodes: Column) -> None:
        columns, self.fabric, gpus = fleet.columns, fabric, shape.slot_gpus
        self.domain = columns.domain[nodes]
        self.leaf, self.pod = columns.leaf[nodes], columns.pod[nodes]
        nic = np.full(len(nodes), gpus * fabric.nic_bytes_per_second // MILLION)
        down = columns.rails_down[nodes]
        for slot in np.flatnonzero(down).tolist():
            rails = max(1, fleet.nodes[int(nodes[slot])].rails)
            left = max(1, rails - int(down[slot]).bit_count())
            nic[slot] = nic[slot] * left // rails
        self.nic_per_us = nic
        share = gpus * fabric.nic_bytes_per_second
        leaf_share = share // fabric.leaf_oversubscription_ppm
        pod_share = share // fabric.pod_oversubscription_ppm
        self.leaf_per_us = np.maximum(1, np.bincount(self.leaf) * leaf_share)
        self.pod_per_us = np.maximum(1, np.bincount(self.pod) * pod_share)

    def flows(self, axis: Flows) -> tuple[int, int]:
        """(nanoseconds, bytes above leaves) of one axis."""
        fabric, each = self.fabric, axis.sent_bytes
        source, target, count = axis.source, axis.target, axis.count
        leaves = self.leaf[source]
        crosses = leaves != self.leaf[target]
        outside = self.domain[source] != self.domain[target]
        spent = each * 10**9 // fabric.domain_bytes_per_second
        if not outside.any():
            return spent, 0
        hops = 1
        load = _sum(source[outside], count[outside], len(self.nic_per_us))
        spent = max(spent, _worst_ns(load * each, self.nic_per_us))
        crossing = 0
        if crosses.any():
            hops = 3
            load = _sum(leaves[crosses], count[crosses], len(self.leaf_per_us))
            crossing = int(load.sum()) * each
            spent = max(spent, _worst_ns(load * each, self.leaf_per_us))
            pods = self.pod[source]
            apart = pods != self.pod[target]
            if apart.any():
                hops = 5
                load = _sum(pods[apart], count[apart], len(self.pod_per_us))
                spent = max(spent, _worst_ns(load * each, self.pod_per_us))
        return spent + hops * fabric.hop_ns, crossing

    def exchange(self, axis: Exchange) -> tuple[int, int]:
        """As ``flows``, of an axis on which all send to all."""
        each = axis.sent_bytes * axis.slot_gpus // axis.slots  # from a slot to another
        pairs = _pairs_leaving(self.domain, axis.slots)
        spent, crossing, hops = _worst_ns(pairs * each, self.nic_per_us), 0, 1
        pairs = _pairs_leaving(self.leaf, axis.slots)
        if pairs.any():
            load = _sum(self.leaf, pairs, len(self.leaf_per_us)) * each
            spent, crossing, hops = (
                max(spent, _worst_ns(load, self.leaf_per_us)),
                int(load.sum()),
                3,
            )
            pairs = _pairs_leaving(self.pod, axis.slots)
            if pairs.any():
                load = _sum(self.pod, pairs, len(self.pod_per_us)) * each
                spent, hops = max(spent, _worst_ns(load, self.pod_per_us)), 5
        return spent + hops * self.fabric.hop_ns, crossing


def _pairs_leaving(domain: Column, slots: int) -> Column:
    """For each slot: the slots of its group that stand in another place."""
    group = np.arange(len(domain), dtype=np.int64) // slots
    width = int(domain.max()) + 1
    _, inverse, here = np.unique(group * width + domain, return_inverse=True, return_counts=True)
    return np.asarray(slots - here[inverse], np.int64)


def _nominal(shape: GangShape, replicas: int) -> tuple[AxisTraffic, ...]:
    sizes = {
        "tensor": shape.tensor,
        "context": shape.context,
        "data": replicas,
        "pipeline": shape.pipeline,
    }
    return tuple(
        AxisTraffic(axis, ranks, ranks, NOMINAL_BYTES[axis], False)
        for axis, ranks in sizes.items()
        if ranks > 1
    )


def _ring(shape: GangShape, replicas: int, axis: AxisTraffic) -> Flows:
    """The flows of an axis whose ranks send to their next neighbour; a pipeline to both."""
    t, c, d, p = shape.tensor, shape.context, replicas, shape.pipeline
    stride, size = {
        "tensor": (1, t),
        "context": (t, c),
        "data": (t, c * d),  # weights are divided over context ranks too
        "pipeline": (t * c * d, p),
    }[axis.axis]
    rank = np.arange(t * c * d * p, dtype=np.int64)
    position = rank // stride % size
    sent = int(axis.sent_bytes)
    if axis.axis == "pipeline":
        # Activations to the next stage, gradients to the one before: half of the bytes each.
        onward, back = rank[position < size - 1], rank[position > 0]
        source = np.concatenate((onward, back))
        target = np.concatenate((onward + stride, back - stride))
        sent //= 2
    else:
        source, target = rank, rank + np.where(position < size - 1, stride, -stride * (size - 1))
    source, target = source // shape.slot_gpus, target // shape.slot_gpus
    leaving = source != target
    slots = shape.slots(replicas)
    key, count = np.unique(source[leaving] * slots + target[leaving], return_counts=True)
    return Flows(axis.axis, sent, key // slots, key % slots, count.astype(np.int64))


def _sum(places: Column, amounts: Column, size: int) -> Column:
    """Amounts by place. Sums stay far below 2**53, where bincount's floats are exact."""
    return np.bincount(places, amounts, minlength=size).astype(np.int64)


def _worst_ns(load_bytes: Column, bytes_per_us: Column) -> int:
    whole, rest = np.divmod(load_bytes, bytes_per_us)
    return int((whole * 1000 + rest * 1000 // bytes_per_us).max())
