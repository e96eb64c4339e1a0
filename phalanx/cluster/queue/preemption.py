"""Whom to stop for a job that may ask for it: those who lose least.

Two jobs may ask: one whose quality of service preempts (it takes preemptible jobs of lower
priority), and one that fits into what its team owns while others borrow it (it takes what is on
loan). Elastic jobs give up replicas before anybody is stopped.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from msgspec import Struct

from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.gang.layout import column_replicas, column_slots, grid
from phalanx.cluster.jobs.job import ClusterJob, JobState
from phalanx.cluster.placement.free_index import Nodes, free_index_of, numbers
from phalanx.cluster.placement.request import PlacementRequest, tensor_slots
from phalanx.cluster.state import View

MOST_PRUNED = 64  # offers that are tried to be done without, those that lose most first


class PreemptionOffer(Struct, frozen=True):
    """What a job could give: some of its nodes by shrinking, or all of them."""

    job: int
    lost_gpu_ns: int
    nodes: tuple[int, ...]
    replicas: int  # that are left; 0: it is stopped


class Eviction(Struct, frozen=True):
    """Who gives what, and the nodes on which the asking job has room then."""

    offers: tuple[PreemptionOffer, ...]
    nodes: tuple[int, ...]


def lost_gpu_ns(view: View, job: ClusterJob) -> int:
    """Work that is lost if a job is stopped: its restart, and what no checkpoint in time saves."""
    expected, policy = job.expected, view.policy.queue
    again = expected.start_ns + expected.form_ns + expected.restore_remote_ns
    step_ns = job.step_ns or expected.step_ns
    if not expected.checkpoint_steps:
        again += max(0, view.now_ns - job.started_ns)
    elif job.saving_ns > policy.grace_ns:
        again += max(0, job.step - job.durable) * step_ns
    return again * view.fleet.job_gpus.get(job.id, 0)


def shrinks(job: ClusterJob, floor: int) -> list[tuple[int, tuple[int, ...]]]:
    """(replicas left, nodes freed) for every number of last columns that a job can give up."""
    shape, placement = job.spec.gang, job.placement
    if placement is None or job.state != JobState.RUNNING or placement.replicas <= floor:
        return []
    together = column_replicas(shape, placement.replicas)
    if not together:
        return []
    _, columns, _ = grid(shape, placement.replicas)
    steps: list[tuple[int, tuple[int, ...]]] = []
    freed: tuple[int, ...] = ()
    for column in range(columns - 1, 0, -1):
        left = placement.replicas - (columns - column) * together
        if left < floor:
            break
        slots = column_slots(shape, placement.replicas, column)
        freed += tuple(placement.nodes[slot] for slot in slots)
        steps.append((left, freed))
    return steps


def shrink_lost_gpu_ns(view: View, job: ClusterJob) -> int:
    """Work that is lost if a job gives up replicas: everybody pauses while it forms anew."""
    expected = job.expected
    pause = expected.form_ns + expected.restore_peer_ns
    return pause * view.fleet.job_gpus.get(job.id, 0)


def choose(
    view: View,
    request: PlacementRequest,
    shrinkable: list[tuple[ClusterJob, int]],
    stoppable: list[ClusterJob],
) -> Eviction | None:
    """Offers that make room for a gang with little lost; None: not even all of them do.

    ``shrinkable`` comes with the fewest replicas each may be left with.
    """
    frame = _Frame(view.fleet, request)
    offers: list[PreemptionOffer] = []
    for job, floor in shrinkable:
        steps = shrinks(job, floor)
        if steps:
            lost = shrink_lost_gpu_ns(view, job)
            offers.append(PreemptionOffer(job.id, lost, steps[-1][1], steps[-1][0]))
    offers.sort(key=lambda offer: (offer.lost_gpu_ns // max(1, len(offer.nodes)), offer.job))
    stops = [
        PreemptionOffer(job.id, lost_gpu_ns(view, job), job.placement.nodes, 0)
        for job in stoppable
        if job.placement is not None
    ]
    stops.sort(key=lambda offer: (frame.price(offer), offer.job))
    if frame.slots == 1 and not offers:
        return frame.cheapest_node(stops)
    useful = [offer for offer in offers + stops if frame.helps(offer)]
    low, high = 0, len(useful) + 1
    while low < high:  # more offers never make less room
        middle = (low + high) // 2
        low, high = (low, middle) if frame.enough(useful[:middle]) else (middle + 1, high)
    if low > len(useful):
        return None
    stopped = dict.fromkeys(offer.job for offer in useful[:low] if not offer.replicas)
    taken = [one for one in useful[:low] if not one.replicas or one.job not in stopped]
    for offer in sorted(taken, key=lambda one: (-one.lost_gpu_ns, one.job))[:MOST_PRUNED]:
        fewer = [one for one in taken if one is not offer]
        if frame.enough(fewer):
            taken = fewer
    taken = [_least_shrink(view, frame, taken, offer) for offer in taken]
    return Eviction(tuple(taken), tuple(sorted(frame.nodes_with_capacity(taken)[: frame.slots])))


def _least_shrink(
    view: View, frame: _Frame, taken: list[PreemptionOffer], offer: PreemptionOffer
) -> PreemptionOffer:
    """A shrinking job gives up no more replicas than are needed."""
    if not offer.replicas:
        return offer
    job = view.jobs[offer.job]
    others = [one for one in taken if one is not offer]
    for left, nodes in shrinks(job, offer.replicas):
        smaller = PreemptionOffer(offer.job, offer.lost_gpu_ns, nodes, left)
        if frame.enough([*others, smaller]):
            return smaller
    return offer


class _Frame:
    """Which nodes would have room for a slot, given some offers."""

    def __init__(self, fleet: Fleet, request: PlacementRequest) -> None:
        self._fleet, self._shape = fleet, request.shape
        free_index = free_index_of(fleet)
        classes = free_index.suiting(
            request.shape, request.constraint, request.partition, request.barred
        )
        self._suiting: Nodes = free_index.sound(classes) & ~request.closed
        for node in request.avoid:
            self._suiting &= ~(1 << node)
        free = free_index.with_free(classes, request.shape.slot_gpus) & self._suiting
        if request.shape.whole_nodes:
            free &= free_index.idle
        self._free: dict[int, None] = dict.fromkeys(numbers(free))
        self.slots = request.shape.slots(request.replicas)
        self._wide = tensor_slots(request.shape)

    def _suits(self, node: int) -> bool:
        return bool(self._suiting >> node & 1)

    def helps(self, offer: PreemptionOffer) -> bool:
        """Whether any of its nodes could hold a slot."""
        return any(self._suits(node) and node not in self._free for node in offer.nodes)

    def price(self, offer: PreemptionOffer) -> int:
        """Lost work for each node that it gives."""
        useful = sum(self._suits(node) for node in offer.nodes)
        return offer.lost_gpu_ns // useful if useful else 2**62

    def nodes_with_capacity(self, offers: list[PreemptionOffer]) -> list[int]:
        """Nodes with room for a slot once the offers are taken, those freed first."""
        given: dict[int, dict[int, None]] = {}
        for offer in offers:
            for node in offer.nodes:
                given.setdefault(node, {})[offer.job] = None
        freed = [node for node, jobs in given.items() if self._has_capacity(node, jobs)]
        return freed + [node for node in self._free if node not in given]

    def enough(self, offers: list[PreemptionOffer]) -> bool:
        """Whether the gang has room once the offers are taken."""
        nodes = self.nodes_with_capacity(offers)
        if len(nodes) < self.slots or self._wide == 1:
            return len(nodes) >= self.slots
        domains = np.bincount(self._fleet.columns.domain[np.asarray(nodes, np.int64)])
        return int((domains // self._wide).sum()) * self._wide >= self.slots

    def cheapest_node(self, stops: list[PreemptionOffer]) -> Eviction | None:
        """For a single slot: the node whose jobs lose least, and only as many as must go."""
        by_node: dict[int, list[PreemptionOffer]] = {}
        for offer in sorted(stops, key=lambda one: (one.lost_gpu_ns, one.job)):
            for node in offer.nodes:
                if self._suits(node):
                    by_node.setdefault(node, []).append(offer)
        best: tuple[int, int, list[PreemptionOffer]] | None = None
        for node, offers in by_node.items():
            if best is not None and offers[0].lost_gpu_ns > best[0]:
                break  # nodes come by their cheapest offer
            taken = self._least_on(node, offers)
            if taken is not None:
                lost = sum(one.lost_gpu_ns for one in taken)
                if best is None or (lost, node) < best[:2]:
                    best = (lost, node, taken)
        return None if best is None else Eviction(tuple(best[2]), (best[1],))

    def _least_on(self, node: int, offers: list[PreemptionOffer]) -> list[PreemptionOffer] | None:
        """The offers on one node that make room at the least loss."""
        missing = self._shape.slot_gpus - self._fleet.free_mask(node).bit_count()
        # least[g]: cheapest offers that free g GPUs or more.
        least: list[tuple[int, list[PreemptionOffer]] | None] = [(0, [])] + [None] * max(0, missing)
        for offer in offers:
            gpus = self._fleet.held[node][offer.job].gpus.bit_count()
            for goal in range(len(least) - 1, 0, -1):
                before = least[max(0, goal - gpus)]
                if before is None:
                    continue
                lost = before[0] + offer.lost_gpu_ns
                known = least[goal]
                if known is None or lost < known[0]:
                    least[goal] = (lost, [*before[1], offer])
        found = least[-1]
        if found is not None and self._has_capacity(node, [one.job for one in found[1]]):
            return found[1]
        # CPUs or memory are short, or nobody else may be there: take from the cheapest on.
        for count in range(1, len(offers) + 1):
            if self._has_capacity(node, [one.job for one in offers[:count]]):
                return offers[:count]
        return None

    def _has_capacity(self, node: int, jobs: Collection[int]) -> bool:
        if not self._suits(node):
            return False
        shares, shape = self._fleet.held[node], self._shape
        if shape.whole_nodes and len(shares) > len(jobs):
            return False
        gpus = self._fleet.free_mask(node).bit_count()
        cpus, memory = self._fleet.free_cpus(node), self._fleet.free_memory(node)
        for job in jobs:
            share = shares[job]
            gpus += share.gpus.bit_count()
            cpus += share.cpus
            memory += share.memory_bytes
        enough = cpus >= shape.slot_cpus and memory >= shape.slot_memory_bytes
        return gpus >= shape.slot_gpus and enough
