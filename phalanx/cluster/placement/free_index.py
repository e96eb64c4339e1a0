"""Where there is room: sets of nodes by class and free GPUs, kept as bits of integers.

An index over the fleet that changes with it: one node costs a microsecond, a set operation over
12,500 nodes a fraction of one. It holds nothing that cannot be computed from the fleet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from phalanx.cluster.fleet.columns import Column
from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.jobs.job import GangShape
from phalanx.cluster.node import Change, NodeState
from phalanx.cluster.placement.constraints import Constraint, matches
from phalanx.cluster.units import HOUR_NS

Nodes = int  # a set of nodes: bit n is node n

TROUBLE = (NodeState.SUSPECT, NodeState.QUARANTINED, NodeState.DEAD)
LEMON_TROUBLES = 3  # so often in trouble within the window: a lemon, used last
LEMON_WINDOW_NS = 14 * 24 * HOUR_NS
MISSES = 16  # nodes tried one by one before all are looked at together
FEW = 24  # nodes of a set that are found faster one by one


class FreeIndex:
    """Healthy nodes of each class by how many of their GPUs are free."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.free: list[list[Nodes]] = []  # [class][free GPUs]
        self.members: list[Nodes] = []  # [class], whatever their state
        self.healthy: Nodes = 0
        self.idle: Nodes = 0  # healthy, and nobody holds any of it
        self.worse: Nodes = 0  # lemons and nodes without all of their rails: used last
        self.renewed: dict[int, None] = {}  # nodes that changed; who follows them clears it
        self._bucket: list[tuple[int, int] | None] = []  # (class, free GPUs) of healthy nodes
        self._flags: list[int] = []  # of each node: healthy, idle, worse
        self._suiting: dict[
            tuple[GangShape, Constraint, str, tuple[str, ...]], tuple[int, ...]
        ] = {}
        for node in range(len(fleet)):
            self._renew(node)
        fleet.changed.clear()

    def refresh(self) -> None:
        """Takes over what changed in the fleet."""
        changed = self._fleet.changed
        for node in changed:
            self._renew(node)
        changed.clear()

    def suiting(
        self,
        shape: GangShape,
        constraint: Constraint,
        partition: str,
        barred: tuple[str, ...] = (),
    ) -> tuple[int, ...]:
        """Classes whose nodes can hold a slot when they are empty; not of ``barred`` partitions."""
        key = (shape, constraint, partition, barred)
        classes = self._suiting.get(key)
        if classes is None:
            classes = self._suiting[key] = tuple(
                number
                for number, node_class in enumerate(self._fleet.classes)
                if (not partition or node_class.partition == partition)
                and node_class.partition not in barred
                and matches(constraint, node_class.features)
                and node_class.gpus >= shape.slot_gpus
                and node_class.cpus >= shape.slot_cpus
                and node_class.memory_bytes >= shape.slot_memory_bytes
            )
        return classes

    def with_free(self, classes: tuple[int, ...], least: int) -> Nodes:
        """Healthy nodes of some classes with at least so many GPUs free."""
        free = 0
        for number in classes:
            for nodes in self.free[number][least:]:
                free |= nodes
        return free

    def sound(self, classes: tuple[int, ...]) -> Nodes:
        """Healthy nodes of some classes, whatever they hold."""
        members = 0
        for number in classes:
            members |= self.members[number]
        return members & self.healthy

    def best_fit(self, shape: GangShape, classes: tuple[int, ...], closed: Nodes) -> int | None:
        """The node for one slot that leaves the fewest GPUs of it free; lemons come last."""
        for kind in (~closed & ~self.worse, ~closed & self.worse):
            allowed = kind & self.idle if shape.whole_nodes else kind
            most = max((len(self.free[number]) for number in classes), default=0)
            for free in range(shape.slot_gpus, most):
                for number in classes:
                    if free < len(self.free[number]):
                        node = self._first(self.free[number][free] & allowed, shape)
                        if node is not None:
                            return node
        return None

    def _first(self, nodes: Nodes, shape: GangShape) -> int | None:
        fleet = self._fleet
        for tried, node in enumerate(numbers(nodes)):
            if tried == MISSES:
                rest = with_host_capacity(fleet, array_of(nodes, len(fleet)), shape)
                return int(rest[0]) if len(rest) else None
            if (
                fleet.free_cpus(node) >= shape.slot_cpus
                and fleet.free_memory(node) >= shape.slot_memory_bytes
            ):
                return node
        return None

    def _renew(self, node: int) -> None:
        fleet, bit = self._fleet, 1 << node
        if node >= len(self._bucket):
            self._grow(node)
        gpus_held, state = fleet.held[node], fleet.state(node)
        old, new = self._bucket[node], None
        if state is NodeState.HEALTHY:
            new = (fleet.class_of(node), fleet.free_mask(node).bit_count())
        self.renewed[node] = None
        if old != new:
            if old is not None:
                self.free[old[0]][old[1]] ^= bit
            if new is not None:
                self.free[new[0]][new[1]] |= bit
            self._bucket[node] = new
        # Large integers are touched only where something changed.
        idle = new is not None and not gpus_held
        bad = bool(fleet.rails_down(node)) or is_lemon(fleet.history.get(node, ()))
        flags = (new is not None) | idle << 1 | bad << 2
        turned = flags ^ self._flags[node]
        if turned:
            self._flags[node] = flags
            self.healthy ^= bit * (turned & 1)
            self.idle ^= bit * (turned >> 1 & 1)
            self.worse ^= bit * (turned >> 2)

    def _grow(self, node: int) -> None:
        fleet = self._fleet
        while len(self.free) < len(fleet.classes):
            self.free.append([0] * (fleet.classes[len(self.free)].gpus + 1))
            self.members.append(0)
        self._suiting.clear()
        for new in range(len(self._bucket), node + 1):
            self._bucket.append(None)
            self._flags.append(0)
            self.members[fleet.class_of(new)] |= 1 << new


def free_index_of(fleet: Fleet) -> FreeIndex:
    """The fleet's room, up to date."""
    free_index = fleet.free_index
    if not isinstance(free_index, FreeIndex):
        free_index = fleet.free_index = FreeIndex(fleet)
    elif fleet.changed:
        free_index.refresh()
    return free_index


def is_lemon(changes: Sequence[Change]) -> bool:
    """Whether a node was in trouble so often that another one is the better choice."""
    if len(changes) < LEMON_TROUBLES:
        return False
    since = changes[-1].time_ns - LEMON_WINDOW_NS
    troubles = sum(change.state in TROUBLE and change.time_ns >= since for change in changes)
    return troubles >= LEMON_TROUBLES


def numbers(nodes: Nodes) -> Iterator[int]:
    """The nodes of a set, lowest first."""
    while nodes:
        bit = nodes & -nodes
        yield bit.bit_length() - 1
        nodes ^= bit


def set_of_nodes(nodes: Sequence[int]) -> Nodes:
    """The set of some nodes."""
    if not nodes:
        return 0
    flags = np.zeros(max(nodes) + 1, np.uint8)
    flags[np.asarray(nodes, np.int64)] = 1
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def array_of(nodes: Nodes, size: int) -> Column:
    """The nodes of a set as numbers, lowest first."""
    if nodes.bit_count() <= FEW:
        return np.fromiter(numbers(nodes), np.int64)
    raw = np.frombuffer(nodes.to_bytes(size // 8 + 1, "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(raw, bitorder="little")).astype(np.int64)


def with_host_capacity(fleet: Fleet, nodes: Column, shape: GangShape) -> Column:
    """Those of some nodes with CPUs and memory for a slot."""
    columns = fleet.columns
    enough = columns.free_cpus[nodes] >= shape.slot_cpus
    if shape.slot_memory_bytes:
        enough &= columns.free_memory[nodes] >= shape.slot_memory_bytes
    return nodes if enough.all() else nodes[enough]
