"""Moves that would make room for large gangs; proposed, never made.

Jobs on a single node are moved: first those on nodes in part, so that whole nodes become free;
then those in leaves that are nearly empty, so that whole leaves do. What moves away never moves
again, and nothing moves onto what is being emptied.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

from phalanx.cluster.jobs.job import ClusterJob, JobState
from phalanx.cluster.node import NodeState
from phalanx.cluster.placement.constraints import parse
from phalanx.cluster.placement.free_index import FreeIndex, Nodes, free_index_of
from phalanx.cluster.placement.request import barred_from
from phalanx.cluster.state import View

MOST_MOVES = 64  # of one proposal: the best ones; ask again when they are made
SPARSE_PPM = 250_000  # a leaf with at most this share of its nodes in use is worth emptying

Move = tuple[int, int, int]


def _nothing(_job: ClusterJob) -> Nodes:
    return 0


def defragment(view: View, kept_from: Callable[[ClusterJob], Nodes] = _nothing) -> tuple[Move, ...]:
    """Moves (job, from node, to node) that would make whole nodes and leaves free.

    ``kept_from``: nodes that are kept for others before a running job will have ended.
    """
    plan = _Plan(view, kept_from)
    for node in plan.partly_used():
        plan.empty([node])
    for leaf in plan.sparse_leaves():
        plan.empty(leaf)
    return tuple(plan.moves)


class _Plan:
    """The fleet as it would be after the moves so far."""

    def __init__(self, view: View, kept_from: Callable[[ClusterJob], Nodes]) -> None:
        self._view, self._fleet = view, view.fleet
        self._kept_from = kept_from
        self._free_index: FreeIndex = free_index_of(view.fleet)
        self.moves: list[Move] = []
        self._closed: dict[int, None] = {}  # nodes being emptied, or emptied
        # (free GPUs, node) of nodes in use that could take more, fullest first
        self._targets: list[tuple[int, int]] = []
        self._free: dict[int, tuple[int, int, int]] = {}  # GPUs, CPUs, memory
        for node in range(len(self._fleet)):
            if self._fleet.held[node] and self._fleet.state(node) is NodeState.HEALTHY:
                free = self._fleet.free_mask(node).bit_count()
                if free:
                    self._targets.append((free, node))
        self._targets.sort()

    def partly_used(self) -> list[int]:
        """Nodes with some GPUs free and all their jobs movable, fewest GPUs in use first."""
        found = [(-free, node) for free, node in self._targets if self._movable(node)]
        return [node for _, node in sorted(found)]

    def sparse_leaves(self) -> list[list[int]]:
        """Nodes in use of leaves that few jobs keep from being empty, sparsest first."""
        used: dict[int, list[int]] = {}
        columns = self._fleet.columns
        sizes: dict[int, int] = {}
        for node, leaf in enumerate(columns.leaf.tolist()):
            sizes[leaf] = sizes.get(leaf, 0) + 1
            if self._fleet.held[node] and node not in self._closed:
                used.setdefault(leaf, []).append(node)
        leaves = [
            (len(nodes), leaf)
            for leaf, nodes in used.items()
            if len(nodes) * 1_000_000 <= sizes[leaf] * SPARSE_PPM
            and all(self._movable(node) for node in nodes)
        ]
        return [used[leaf] for _, leaf in sorted(leaves)]

    def empty(self, nodes: list[int]) -> None:
        """Moves everything off some nodes, or nothing."""
        jobs = [job for node in nodes for job in self._fleet.held[node]]
        moved_here = any(target in nodes for _, _, target in self.moves)
        if moved_here or len(self.moves) + len(jobs) > MOST_MOVES:
            return
        kept = (list(self.moves), list(self._targets), dict(self._free), dict(self._closed))
        self._closed.update(dict.fromkeys(nodes))
        for node in nodes:
            sizes = sorted(
                (-held.gpus.bit_count(), job) for job, held in self._fleet.held[node].items()
            )
            for _, job in sizes:
                if not self._move(self._view.jobs[job], node):
                    self.moves, self._targets, self._free, self._closed = kept
                    return

    def _move(self, job: ClusterJob, source: int) -> bool:
        shape, spec = job.spec.gang, job.spec
        barred = barred_from(self._view.policy.queue, spec)
        classes = self._free_index.suiting(shape, parse(spec.constraint), spec.partition, barred)
        gpus_held = self._fleet.held[source][job.id]
        gpus = gpus_held.gpus.bit_count()
        kept = self._kept_from(job)
        for index in range(bisect_left(self._targets, (gpus, -1)), len(self._targets)):
            free, node = self._targets[index]
            free_host = self._free.get(
                node, (free, self._fleet.free_cpus(node), self._fleet.free_memory(node))
            )
            fits = free_host[1] >= gpus_held.cpus and free_host[2] >= gpus_held.memory_bytes
            suits = int(self._fleet.columns.node_class[node]) in classes
            if node in self._closed or not fits or not suits or job.id in self._fleet.held[node]:
                continue
            if kept >> node & 1:
                continue
            del self._targets[index]
            if free > gpus:
                insort(self._targets, (free - gpus, node))
            self._free[node] = (
                free - gpus,
                free_host[1] - gpus_held.cpus,
                free_host[2] - gpus_held.memory_bytes,
            )
            self.moves.append((job.id, source, node))
            return True
        return False

    def _movable(self, node: int) -> bool:
        for number in self._fleet.held[node]:
            job = self._view.jobs.get(number)
            if job is None or job.state != JobState.RUNNING or job.placement is None:
                return False
            if len(job.placement.nodes) != 1 or job.spec.gang.whole_nodes:
                return False
        return bool(self._fleet.held[node])
