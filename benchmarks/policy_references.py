"""Textbook schedulers to measure the queue against, on the packing of the core's own placement.

First come first served, EASY backfill, greedy (whoever fits, in order of arrival) and the shortest
job first, told how long each will run. They know nothing of teams, failures or preemption.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from msgspec import Struct, structs

from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.jobs.job import ClusterJob, JobSpec, Placement
from phalanx.cluster.placement.choose import place
from phalanx.cluster.placement.free_index import Nodes, set_of_nodes
from phalanx.cluster.placement.request import PlacementRequest, held_by, request_of
from phalanx.cluster.policy import Policy
from phalanx.simulate.policies.outcome import PlayedJob

Order = Callable[["WaitingJob"], float]


class WaitingJob(Struct):
    """A job of a trace as a scheduler sees it."""

    number: int
    played: PlayedJob
    spec: JobSpec
    hold: float  # how long it will hold its nodes
    bound: float  # how long it says that it may at most; infinite: it says nothing


class Reference:
    """One scheduler over a fleet that never fails."""

    def __init__(self, fleet: Fleet, order: Order, backfill: str) -> None:
        self.fleet, self.order, self.backfill = fleet, order, backfill
        self.now = 0.0
        self._waiting: dict[int, list[tuple[float, int]]] = {}  # by GPUs, sorted by the order
        self._bounds: dict[int, list[float]] = {}  # by GPUs, of those that wait, sorted
        self._jobs: dict[int, WaitingJob] = {}
        self._ends: list[tuple[float, int]] = []
        self._placed: dict[int, tuple[Placement, float]] = {}  # by job: where, until when at most
        self._requests: dict[int, PlacementRequest] = {}  # by GPUs

    def run(self, jobs: list[WaitingJob]) -> None:
        """Plays all jobs until the last has ended; writes their stays."""
        arriving = sorted(jobs, key=lambda job: (job.played.submit, job.number))
        position = 0
        while position < len(arriving) or self._ends:
            comes = arriving[position].played.submit if position < len(arriving) else float("inf")
            if self._ends and self._ends[0][0] <= comes:
                self.now = self._ends[0][0]
                while self._ends and self._ends[0][0] == self.now:
                    self._end(heappop(self._ends)[1])
            else:
                self.now = comes
                self._add(arriving[position])
                position += 1
            self._look()
        left = sum(map(len, self._waiting.values()))
        assert not left, f"{left} jobs never started"

    def _add(self, job: WaitingJob) -> None:
        gpus = job.played.gpus
        self._jobs[job.number] = job
        if gpus not in self._requests:
            asking = ClusterJob(id=job.number, spec=job.spec, submitted_ns=0, queued_ns=0)
            self._requests[gpus] = request_of(asking, 0, Policy())
        insort(self._waiting.setdefault(gpus, []), (self.order(job), job.number))
        insort(self._bounds.setdefault(gpus, []), job.bound)

    def _end(self, number: int) -> None:
        placement, _ = self._placed.pop(number)
        for node in placement.nodes:
            self.fleet.release(number, node)
        job = self._jobs.pop(number)
        job.played.end = self.now

    def _look(self) -> None:
        """Starts what may start now."""
        if self.backfill == "greedy":
            while self._start_first(lambda gpus: iter(self._waiting[gpus]), 0, 0.0):
                pass
            return
        head = self._head()
        while head is not None and self._start(*head, 0):
            head = self._head()
        if head is not None and self.backfill == "easy":
            gpus, number = head
            shadow, nodes = self._shadow(gpus)

            def behind(size: int) -> Iterator[tuple[float, int]]:
                return (entry for entry in self._waiting[size] if entry[1] != number)

            while self._start_first(behind, nodes, shadow):
                pass

    def _head(self) -> tuple[int, int] | None:
        """GPUs and number of the job that comes first."""
        first = [(entries[0], gpus) for gpus, entries in self._waiting.items() if entries]
        if not first:
            return None
        (_, number), gpus = min(first)
        return gpus, number

    def _start_first(
        self, queue: Callable[[int], Iterator[tuple[float, int]]], kept: Nodes, until: float
    ) -> bool:
        """Starts the first that fits: beside the kept nodes, or on them if it is gone in time."""
        best: tuple[tuple[float, int], int, Nodes] | None = None
        for gpus in self._waiting:
            entry, closed = next(queue(gpus), None), kept
            if entry is None:
                continue
            if not self._fits(gpus, kept):
                if self.now + self._bounds[gpus][0] > until or not self._fits(gpus, 0):
                    continue
                closed = 0
                short = (one for one in queue(gpus) if self.now + self._jobs[one[1]].bound <= until)
                entry = next(short, None)
            if entry is not None and (best is None or (entry, gpus) < best[:2]):
                best = (entry, gpus, closed)
        return best is not None and self._start(best[1], best[0][1], best[2])

    def _fits(self, gpus: int, closed: Nodes) -> bool:
        return isinstance(self._place(gpus, closed), Placement)

    def _place(self, gpus: int, closed: Nodes) -> object:
        request = self._requests[gpus]
        if closed:
            request = structs.replace(request, closed=closed)
        return place(self.fleet, request)

    def _start(self, gpus: int, number: int, closed: Nodes) -> bool:
        placement = self._place(gpus, closed)
        if not isinstance(placement, Placement):
            return False
        job, shape = self._jobs[number], self._requests[gpus].shape
        masks = placement.gpus or tuple((1 << shape.slot_gpus) - 1 for _ in placement.nodes)
        for node, mask in zip(placement.nodes, masks, strict=True):
            self.fleet.take(number, node, held_by(self.fleet, shape, node, mask))
        self._waiting[gpus].remove((self.order(job), number))
        bounds = self._bounds[gpus]
        del bounds[bisect_left(bounds, job.bound)]
        job.played.stays.append((self.now, self.now + job.hold, job.played.gpus))
        self._placed[number] = (placement, self.now + job.bound)
        heappush(self._ends, (self.now + job.hold, number))
        return True

    def _shadow(self, gpus: int) -> tuple[float, Nodes]:
        """(when, on which nodes) the head starts if all run to their bounds."""
        shape = self._requests[gpus].shape
        ends = {number: until for number, (_, until) in self._placed.items()}
        ready: list[tuple[float, int]] = []
        for node in range(len(self.fleet)):
            held = self.fleet.held[node]
            if shape.whole_nodes:
                ready.append((max((ends[job] for job in held), default=self.now), node))
                continue
            free = self.fleet.free_mask(node).bit_count()
            at = self.now
            for end, more in sorted(
                (ends[job], part.gpus.bit_count()) for job, part in held.items()
            ):
                if free >= shape.slot_gpus:
                    break
                free, at = free + more, end
            if free >= shape.slot_gpus:
                ready.append((at, node))
        ready.sort()
        slots = shape.slots(shape.replicas)
        shadow = ready[slots - 1][0]
        # Of the nodes that are ready by then, those that become so last: others stay useful.
        able = [entry for entry in ready if entry[0] <= shadow]
        last = sorted(able, key=lambda entry: (-entry[0], entry[1]))[:slots]
        return shadow, set_of_nodes(tuple(node for _, node in last))
