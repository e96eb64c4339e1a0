"""The pending jobs, so indexed that a pass over the queue looks at few of them.

Jobs that ask for the same thing share a ``Demand``: when it has no room, none of them has. Demands
that differ only in how long they hold nodes share a ``DemandGroup``: when one has no room, none has
that holds them as long. Jobs of one team and one base priority form a lane, in which they stay in
order of arrival forever; only between lanes does the order change with time, by age and fair share.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import TypeVar

from phalanx.cluster.jobs.horizon import bound_ns, least_bound_ns, length_ns
from phalanx.cluster.jobs.job import ClusterJob, GangShape
from phalanx.cluster.placement.free_index import FreeIndex
from phalanx.cluster.placement.request import PlacementRequest, barred_from, gpus_of, request_of
from phalanx.cluster.policy import QueuePolicy
from phalanx.cluster.queue.fairshare import ONE, factors
from phalanx.cluster.state import View
from phalanx.cluster.units import SECOND_NS

LARGEST_BITS = 17  # a gang of 100,000 GPUs has the whole of ``size_weight``
SHORTEST_NS = 60 * SECOND_NS  # a limit of this and less has the whole of ``short_weight``
SHORT_BITS = 17  # so often may that double until nothing is left of it


Entry = tuple[int, int]  # (queued_ns, job)
T = TypeVar("T", Entry, int)
Key = tuple[GangShape, int, str, str, tuple[str, ...], int, int | None, int | None, int]
GroupKey = tuple[GangShape, int, str, str, tuple[str, ...], int]
UNBOUNDED_NS = 2**62  # how long a job holds its nodes of which nobody says it


class Lane:
    """Where a job waits: only jobs of other lanes can overtake those before it."""

    def __init__(self, team: str, qos: str, base: int, given: int = 0) -> None:
        self.team, self.qos = team, qos
        self.base = base  # priority that does not change with time
        self.given = given  # what of it people gave
        self.entries: list[Entry] = []  # sorted


class Demand:
    """What some pending jobs ask for alike, and for how long."""

    def __init__(self, key: Key, group: DemandGroup, gpus: int, least_gpus: int) -> None:
        self.key = key
        self.group = group
        self.request = group.request
        self.gpus = gpus
        self.least_gpus = least_gpus  # of the fewest replicas that they start with
        self.bound_ns = key[-3]  # the longest that they hold nodes; None: nobody says
        # The same, or less where they accept a shorter limit.
        self.held_ns = UNBOUNDED_NS if key[-2] is None else key[-2]
        self.length_ns = key[-1]  # how long they hold them as far as one can tell
        self.lanes: dict[Lane, list[Entry]] = {}  # sorted


class DemandGroup:
    """Demands for the same nodes, for however long."""

    def __init__(self, key: GroupKey, request: PlacementRequest) -> None:
        self.key = key
        self.request = request  # of any of them
        shape = request.shape
        self.least_slots = shape.slots(min(shape.floor, request.replicas))
        # The room and how many classes the fleet had, and what was found.
        self._suiting: tuple[FreeIndex | None, int, tuple[int, ...]] = (None, -1, ())
        self.lanes: dict[Lane, list[Entry]] = {}  # sorted
        self.stays: dict[Lane, list[int]] = {}  # how long these hold their nodes, sorted

    def suiting(self, free_index: FreeIndex, classes: int) -> tuple[int, ...]:
        """Classes of nodes that would do, of so many that the fleet has."""
        if self._suiting[0] is not free_index or self._suiting[1] != classes:
            asked = self.request
            found = free_index.suiting(asked.shape, asked.constraint, asked.partition, asked.barred)
            self._suiting = (free_index, classes, found)
        return self._suiting[2]


class PendingJobs:
    """All pending jobs, by lane and by demand."""

    def __init__(self) -> None:
        self.lanes: dict[tuple[str, str, int, int], Lane] = {}
        self.demands: dict[Key, Demand] = {}
        self.groups: dict[GroupKey, DemandGroup] = {}
        self.where: dict[int, tuple[Lane, Demand, int]] = {}  # by job; the last: queued_ns
        self.held_ns: dict[int, int] = {}  # by job: ``held_ns`` of its demand
        self.gpu_ns = 0  # that all of them will hold, as far as one can tell
        self._node_gpus = -1  # of the largest node when demands were counted

    def __len__(self) -> int:
        return len(self.where)

    def add(self, view: View, *jobs: ClusterJob) -> None:
        """Jobs became eligible that differ in nothing but their numbers."""
        for job in jobs:
            self.remove(job.id)
        lane, demand = self._kept_under(view, jobs[0])
        group, held_ns = demand.group, demand.held_ns
        entries = [(job.queued_ns, job.id) for job in jobs]
        self.gpu_ns += demand.gpus * demand.length_ns * len(jobs)
        _insert(lane.entries, entries)
        _insert(demand.lanes.setdefault(lane, []), entries)
        _insert(group.lanes.setdefault(lane, []), entries)
        _insert(group.stays.setdefault(lane, []), [held_ns] * len(jobs))
        for queued_ns, number in entries:
            self.where[number] = (lane, demand, queued_ns)
            self.held_ns[number] = held_ns

    def _kept_under(self, view: View, job: ClusterJob) -> tuple[Lane, Demand]:
        """The lane and the demand of a job, made where it is the first."""
        spec = job.spec
        bounds = (bound_ns(view, job), least_bound_ns(view, job))
        where = (spec.constraint, spec.partition, barred_from(view.policy.queue, spec))
        shared = (spec.gang, job.wanted_replicas, *where, spec.spares)
        key = (*shared, *bounds, length_ns(view, job))
        demand = self.demands.get(key)
        if demand is None:
            group = self.groups.get(shared)
            if group is None:
                group = DemandGroup(shared, request_of(job, 0, view.policy))
                self.groups[shared] = group
            least = min(spec.gang.floor, job.wanted_replicas)
            gpus, least_gpus = gpus_of(view.fleet, job), gpus_of(view.fleet, job, least)
            demand = self.demands[key] = Demand(key, group, gpus, least_gpus)
        parts = base_parts(view.policy.queue, job)
        lane_key = (spec.team, spec.qos, sum(parts.values()), given_priority(parts))
        lane = self.lanes.get(lane_key)
        if lane is None:
            lane = self.lanes[lane_key] = Lane(*lane_key)
        return lane, demand

    def refresh(self, view: View) -> None:
        """Counts anew what jobs ask for, where the largest node of the fleet is another one."""
        node_gpus = max((known.gpus for known in view.fleet.classes), default=0)
        if node_gpus != self._node_gpus:
            self._node_gpus = node_gpus
            asking = list(self.where)
            for number in asking:  # all first: a demand that is left would stay as it is
                self.remove(number)
            for number in asking:
                self.add(view, view.jobs[number])

    def remove(self, job: int) -> None:
        """A job started or was withdrawn."""
        kept = self.where.pop(job, None)
        if kept is None:
            return
        lane, demand, queued_ns = kept
        self.gpu_ns -= demand.gpus * demand.length_ns
        del self.held_ns[job]
        entry, group = (queued_ns, job), demand.group
        del lane.entries[bisect_left(lane.entries, entry)]
        if not lane.entries:
            del self.lanes[(lane.team, lane.qos, lane.base, lane.given)]
        for lanes in (demand.lanes, group.lanes):
            entries = lanes[lane]
            del entries[bisect_left(entries, entry)]
            if not entries:
                del lanes[lane]
        stays = group.stays[lane]
        del stays[bisect_left(stays, demand.held_ns)]
        if not stays:
            del group.stays[lane]
        if not demand.lanes:
            del self.demands[demand.key]
            if not group.lanes:
                del self.groups[group.key]


def _insert(ordered: list[T], new: list[T]) -> None:
    """Adds some values, themselves sorted, to a sorted list."""
    if len(new) == 1:
        insort(ordered, new[0])
    else:
        ordered += new
        ordered.sort()  # two sorted runs: merged, not sorted


def starves(view: View, job: ClusterJob) -> bool:
    """Whether a pending job has waited too long."""
    return waited_ns(view, job) >= view.policy.queue.starving_ns


def waited_ns(view: View, job: ClusterJob) -> int:
    """How long a pending job has waited, all its time in the queue together."""
    return job.waited_ns + view.now_ns - job.queued_ns


def base_parts(policy: QueuePolicy, job: ClusterJob) -> dict[str, int]:
    """The parts of a job's priority that do not change while it waits."""
    spec = job.spec
    qos, partition = policy.qos.get(spec.qos), policy.partitions.get(spec.partition)
    bits = min(LARGEST_BITS, spec.gang.gpus(spec.gang.replicas).bit_length())
    return {
        "job": spec.priority,
        "qos": qos.priority if qos else 0,
        "partition": partition.priority if partition else 0,
        "size": policy.size_weight * bits // LARGEST_BITS,
        "short": policy.short_weight * _short_bits(spec.time_limit_ns) // SHORT_BITS,
    }


def given_priority(parts: dict[str, int]) -> int:
    """What people gave a job, of its base parts: neither its size nor its limit counts."""
    return parts["job"] + parts["qos"] + parts["partition"]


def _short_bits(limit_ns: int) -> int:
    """How often a time limit could double until it is long; none is as long as can be."""
    if not limit_ns:
        return 0
    doublings: int = (max(0, limit_ns - 1) // SHORTEST_NS).bit_length()
    return max(0, SHORT_BITS - doublings)


class Priorities:
    """Priorities at one moment."""

    def __init__(self, view: View, usage: dict[str, int], held: dict[str, int]) -> None:
        self._policy, self._now = view.policy.queue, view.now_ns
        self._quotas, self._held, self._usage = view.quotas, held, usage
        self._factors: dict[str, int] | None = None  # not asked for yet
        self._full_ns = max(1, self._policy.age_full_ns)
        self._fixed: dict[Lane, int] = {}  # what no start in this pass changes
        self.settled = not view.quotas  # starts change no priority

    def parts(self, lane: Lane, queued_ns: int, gpus: int) -> tuple[int, int, int]:
        """(age, fair share, quota) parts of a job's priority."""
        policy = self._policy
        owned = bool(self._quotas) and self.entitled(lane.team, gpus)
        return self._age(queued_ns), self._fair(lane.team), policy.quota_weight if owned else 0

    def of(self, lane: Lane, queued_ns: int, gpus: int) -> int:
        """The whole priority."""
        fixed = self._fixed.get(lane)
        if fixed is None:
            fixed = self._fixed[lane] = lane.base + self._fair(lane.team)
        if self._quotas and self.entitled(lane.team, gpus):
            fixed += self._policy.quota_weight
        return fixed + self._age(queued_ns)

    def _age(self, queued_ns: int) -> int:
        waited = self._now - queued_ns
        if waited >= self._full_ns:
            return self._policy.age_weight
        return self._policy.age_weight * waited // self._full_ns if waited > 0 else 0

    def _fair(self, team: str) -> int:
        if self._factors is None:
            weights = {team: quota.weight for team, quota in self._quotas.items()}
            for known in self._usage:
                weights.setdefault(known, 1)
            self._factors = factors(self._usage, weights)
        factor = self._factors.get(team, ONE)  # a team that never ran used nothing
        return self._policy.fair_share_weight * factor >> 32

    def entitled(self, team: str, gpus: int) -> bool:
        """Whether a team may start this much within what it owns."""
        quota = self._quotas.get(team)
        return quota is not None and self._held.get(team, 0) + gpus <= quota.gpus


class Stays:
    """How long a job of some group may hold its nodes to have room in this pass."""

    __slots__ = ("longest_ns",)

    def __init__(self, longest_ns: int) -> None:
        self.longest_ns = longest_ns  # it becomes less as others start


class PriorityOrder:
    """Jobs in order of priority, from several lanes.

    Starting a job can only lower the priorities of its team, so an entry is weighed again when it
    comes up, and put back when it is no longer first.
    """

    def __init__(self, waiting: PendingJobs, ranks: Priorities) -> None:
        self._where, self._ranks = waiting.where, ranks
        self._held_ns = waiting.held_ns
        # Lane, its jobs, how long they may hold nodes, and how long they do (sorted).
        self._sources: list[tuple[Lane, list[Entry], Stays | None, Sequence[int]]] = []
        self._last: list[Entry] = []  # by source: its entry in the heap, or that was there last
        self._heap: list[tuple[int, int, int, int]] = []  # -priority, queued_ns, job, source
        self._ordered = False

    def add(
        self,
        lane: Lane,
        entries: list[Entry],
        stays: Stays | None = None,
        held_ns: Sequence[int] = (),
    ) -> None:
        """Jobs of a lane, all or some, in order of arrival; who stays too long is passed over.

        ``held_ns``: how long they stay, the shortest first; where even that is too long, none of
        them is looked at.
        """
        source = len(self._sources)
        self._sources.append((lane, entries, stays, held_ns))
        self._last.append(entries[0])
        found = self._entry(source, entries[0]) if stays is None else self._from(source, 0)
        if found is not None:
            self._heap.append(found)
            self._ordered = False

    def pop(self) -> tuple[int, Lane, Demand, int] | None:
        """(job, lane, demand, source) of the first job; the source waits for ``go_on``."""
        if not self._ordered:
            heapify(self._heap)
            self._ordered = True
        while self._heap:
            negative, queued_ns, job, source = heappop(self._heap)
            entry = self._where.get(job)
            if entry is None:  # another source had it, too, and it started
                self.go_on(source)
                continue
            lane, demand, _ = entry
            if self._ranks.settled:
                return job, lane, demand, source
            weight = self._ranks.of(lane, queued_ns, demand.gpus)
            if weight == -negative:
                return job, lane, demand, source
            heappush(self._heap, (-weight, queued_ns, job, source))
        return None

    def first_priority(self) -> int | None:
        """Of the job that comes first; None: there is none."""
        return -min(self._heap)[0] if self._heap else None

    def go_on(self, source: int) -> None:
        """The next job of a source."""
        entries = self._sources[source][1]
        found = self._from(source, bisect_right(entries, self._last[source]))
        if found is not None:
            heappush(self._heap, found)

    def _from(self, source: int, position: int) -> tuple[int, int, int, int] | None:
        """The first job of a source from there on that does not stay too long."""
        _, entries, stays, shortest = self._sources[source]
        if stays is not None:
            held_ns, longest_ns = self._held_ns, stays.longest_ns
            if not shortest or shortest[0] > longest_ns:
                return None
            while position < len(entries) and held_ns[entries[position][1]] > longest_ns:
                position += 1
        if position == len(entries):
            return None
        self._last[source] = entries[position]
        return self._entry(source, entries[position])

    def _entry(self, source: int, entry: Entry) -> tuple[int, int, int, int]:
        """A job of a source as it stands in the heap."""
        queued_ns, job = entry
        gpus = 0 if self._ranks.settled else self._where[job][1].gpus
        return -self._ranks.of(self._sources[source][0], queued_ns, gpus), queued_ns, job, source
