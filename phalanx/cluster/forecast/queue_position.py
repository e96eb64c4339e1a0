"""When a job that stands in the queue will probably start, and what is in its way.

A job that is not in the queue yet is looked at as if it came now.
"""

from __future__ import annotations

from enum import Enum, auto

from msgspec import Struct, structs

from phalanx.cluster.forecast.outlook import OrderKey, Outlook, least_of
from phalanx.cluster.forecast.when import Unknown, UnknownStart, When, latest
from phalanx.cluster.jobs.feasibility import never_starts
from phalanx.cluster.jobs.horizon import NEVER_NS, bound_ns
from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.placement.choose import PlacementRefusal, place
from phalanx.cluster.placement.free_index import free_index_of
from phalanx.cluster.placement.request import PlacementRequest, barred_from, gpus_of, request_of
from phalanx.cluster.queue.claims import collected, collector, promise_start
from phalanx.cluster.queue.decisions import Reserved
from phalanx.cluster.queue.holdings import Limited
from phalanx.cluster.queue.index import QueueIndex
from phalanx.cluster.queue.limits import AtLimit
from phalanx.cluster.queue.pending import Demand, DemandGroup, Key, Lane, base_parts
from phalanx.cluster.queue.promises import unmoved
from phalanx.cluster.reasons import Reason, reason, span_of
from phalanx.cluster.state import View

LAST = 2**62  # the number of a job that comes now: behind all others of this moment
ITSELF = 0  # in place of a job's number: whoever asks is to blame


class Way(Enum):
    """What is in the way of a job of the queue."""

    NOTHING = auto()  # it starts at the next look
    NO_ROOM = auto()
    WINDOW = auto()  # its nodes are wanted for a reservation
    PROMISED = auto()  # to another job
    COLLECTED = auto()  # for a job that has waited far too long
    DEPTH = auto()  # the queue does not look so far


class Obstacle(Struct, frozen=True):
    """Why a job of the queue does not start."""

    way: Way
    why: Reason
    problem: str = ""  # where there is no room: what it lacks
    ahead: int = 0  # and jobs before it


class QueuePosition(Struct, frozen=True):
    """Where a job stands in the queue."""

    lane: Lane
    demand: Demand
    queued_ns: int
    place: OrderKey


class QueueView:
    """The queue at one moment, to be asked about its jobs."""

    def __init__(self, index: QueueIndex, view: View) -> None:
        self._index, self._view = index, view
        self._waiting, self._promises = index.waiting, index.promises
        self.ranks = index.ranks(view)
        self._outlook = Outlook(index.waiting, index.holdings, view, self.ranks)
        self._saved = index.limits.saved_for(view)  # by limit: the job that starves under it
        self._collector = collector(index, view, self._saved)  # it gets all that becomes free
        self._positions: dict[int, QueuePosition] = {}
        self._obstacles: dict[int, Obstacle] = {}
        self._alike: dict[tuple[Key, str, str, int], When] = {}
        self._alone: dict[tuple[object, ...], int | None] = {}

    def has(self, number: int) -> bool:
        """Whether a job is in the queue."""
        return number in self._waiting.where

    def position(self, job: ClusterJob) -> QueuePosition:
        """Where a job stands, or would."""
        position = self._positions.get(job.id)
        if position is None:
            entry = self._waiting.where.get(job.id)
            lane, demand, queued_ns = entry or self._newcomer(job)
            rank = self.ranks.of(lane, queued_ns, demand.gpus)
            number = job.id if entry else LAST
            position = QueuePosition(lane, demand, queued_ns, (-rank, queued_ns, number))
            self._positions[job.id] = position
        return position

    def promise(self, number: int) -> Reserved | None:
        """A promised start that is still to come, and can."""
        reserved = self._promises.by_job.get(number)
        if reserved is None or reserved.start_ns <= self._view.now_ns:
            return None
        gone = self._promises.nodes(number) & ~free_index_of(self._view.fleet).healthy
        return None if gone else reserved  # one of its nodes is gone: the next look finds another

    def is_first(self, job: ClusterJob) -> bool:
        """Whether nobody is before a job, and nothing is kept for anybody."""
        if self._promises.by_job or self._view.reservations:
            return False
        return not self._outlook.jobs_ahead(self.position(job).place)

    def is_next(self, job: ClusterJob) -> bool:
        """Whether nobody can take what a job was promised: it starves, and has for the longest.

        Under a limit that is shared with others, those may have used that up.
        """
        lane, promise = self.position(job).lane, self.promise(job.id)
        if promise is None or not unmoved(self._view, promise):
            return False
        if any(self._outlook.limited(*limit) for limit in _limits(lane)):
            return False
        oldest = min(known.entries[0] for known in self._waiting.lanes.values())
        return oldest[1] == job.id

    def savers(self, job: ClusterJob) -> list[tuple[str, int]]:
        """(what, for which job) is saved that this one would need: others starve under limits."""
        team, qos = job.spec.team, job.spec.qos
        saver_of = {
            f"team {team}": self._saved.get((Limited.TEAM, team)),
            f"class of service {qos}": self._saved.get((Limited.QOS, qos)),
        }
        return [(what, one) for what, one in saver_of.items() if one is not None and one != job.id]

    def start(self, job: ClusterJob) -> When:
        """When a job will start; if it is not in the queue: if it came now."""
        if self.has(job.id):
            return self._start(job)
        position, spec = self.position(job), job.spec
        key = (position.demand.key, spec.team, spec.qos, position.lane.base)
        when = self._alike.get(key)
        if when is None:
            when = self._start(job)
            if isinstance(when, UnknownStart) and when.job == job.id:
                when = structs.replace(when, job=ITSELF)
            self._alike[key] = when
        if isinstance(when, UnknownStart) and when.job == ITSELF:
            return structs.replace(when, job=job.id)
        return when

    def _start(self, job: ClusterJob, *, saver: bool = False) -> When:
        """``saver``: for whom others wait, and who waits for none of them."""
        view, position = self._view, self.position(job)
        never = never_starts(view, job)
        if never is not None:
            return UnknownStart(job.id, Unknown.NEVER, never)
        gate = self._index.limits.gate(view, position.lane, position.demand.least_gpus)
        before = [] if saver else self.savers(job)
        times = [self._start(view.jobs[number], saver=True) for _, number in before]
        if gate is None and not before:
            way = self.obstacle(job).way if self.has(job.id) else None
            if way is Way.NOTHING:
                return view.now_ns
            if way is Way.COLLECTED:
                times.append(self._promises.by_job[self._collector].start_ns)
            promise = self.promise(job.id)
            if promise is not None and not promise.waits:
                return self._kept(job, promise)
        else:
            for limit, name in _limits(position.lane):
                if self._outlook.limited(limit, name):
                    at_ns = self._outlook.limit_ns(position.place, position.demand, limit, name)
                    times.append(_limit_endless(job, gate) if at_ns is None else at_ns)
        times.append(self._capacity(job, position))
        return latest(times)

    def _kept(self, job: ClusterJob, promise: Reserved) -> When:
        """When a promise will be kept: what the queue reckoned with may have been too short."""
        if promise.asked:
            return promise.start_ns
        fleet = self._view.fleet
        holders = dict.fromkeys(number for node in promise.nodes for number in fleet.held[node])
        for number in holders:
            if self._outlook.end_ns(number) == NEVER_NS:
                return self._endless(job, number)
        ends = [self._outlook.end_ns(number) for number in holders]
        return self._unless_assumed(job, max([promise.start_ns, *ends]))

    def _unless_assumed(self, job: ClusterJob, at_ns: int) -> When:
        """A start, unless it rests on how long jobs run of which nobody says that."""
        if at_ns - self._view.now_ns < self._view.policy.queue.unbounded_ns:
            return at_ns
        other = self._outlook.endless_ahead(self.position(job).place)
        if not other:
            return at_ns
        return UnknownStart(job.id, Unknown.OTHERS_RUN_ON, reason("ahead_endless", job=other))

    def obstacle(self, job: ClusterJob) -> Obstacle:
        """Why a job of the queue does not start."""
        obstacle = self._obstacles.get(job.id)
        if obstacle is None:
            obstacle = self._obstacles[job.id] = self._obstacle(job)
        return obstacle

    def _obstacle(self, job: ClusterJob) -> Obstacle:
        view, position = self._view, self.position(job)
        ahead = self._outlook.jobs_ahead(position.place)
        request = structs.replace(least_of(position.demand), job=job.id)
        found = place(view.fleet, request)
        if isinstance(found, PlacementRefusal):
            return no_capacity(str(found.reason), ahead)
        bound = bound_ns(view, job)
        end_ns = None if bound is None else view.now_ns + bound
        limit = span_of(job.spec.time_limit_ns) if job.spec.time_limit_ns else "none"
        closed = 0
        for name, nodes in self._index.windows.shut(view, job.spec.team, end_ns):
            closed |= nodes
            if self._refused(structs.replace(request, closed=closed)):
                return Obstacle(Way.WINDOW, reason("waits_for_window", name=name, limit=limit))
        for other, promise in self._promises.by_job.items():
            if other != job.id and (end_ns is None or end_ns > promise.empty_ns):
                closed |= self._promises.nodes(other)
                if self._refused(structs.replace(request, closed=closed)):
                    span = span_of(max(0, promise.start_ns - view.now_ns))
                    why = reason("kept_for_others", job=other, span=span, limit=limit)
                    return Obstacle(Way.PROMISED, why)
        if self._collector not in (0, job.id):
            closed |= collected(self._waiting, view, self._collector)
            if self._refused(structs.replace(request, closed=closed)):
                late = view.jobs[self._collector]
                span = span_of(late.waited_ns + view.now_ns - late.queued_ns)
                return Obstacle(Way.COLLECTED, reason("collected_for", job=late.id, span=span))
        depth = view.policy.queue.backfill_depth
        if ahead > depth:
            return Obstacle(Way.DEPTH, reason("beyond_depth", ahead=ahead, depth=depth))
        return Obstacle(Way.NOTHING, reason("next_look"))

    def _refused(self, request: PlacementRequest) -> bool:
        return isinstance(place(self._view.fleet, request), PlacementRefusal)

    def _newcomer(self, job: ClusterJob) -> tuple[Lane, Demand, int]:
        view, spec = self._view, job.spec
        policy, least = view.policy.queue, min(spec.gang.floor, job.wanted_replicas)
        where = (spec.constraint, spec.partition, barred_from(policy, spec))
        # How long it runs says nothing about its start: jobs of any length are alike.
        shared = (spec.gang, job.wanted_replicas, *where, spec.spares)
        gpus, least_gpus = gpus_of(view.fleet, job), gpus_of(view.fleet, job, least)
        group = DemandGroup(shared, request_of(job, 0, view.policy))
        demand = Demand((*shared, None, None, 0), group, gpus, least_gpus)
        lane = Lane(spec.team, spec.qos, sum(base_parts(policy, job).values()))
        return lane, demand, view.now_ns

    def _capacity(self, job: ClusterJob, position: QueuePosition) -> When:
        """When there are nodes for a job, and GPUs for it and those before it."""
        alone_ns = self._alone_ns(job, position)
        if alone_ns is None:
            return self._no_nodes(job, position.demand)
        capacity_ns = self._outlook.capacity_ns(position.place, position.demand)
        if capacity_ns is not None:
            return self._unless_assumed(job, max(alone_ns, capacity_ns))
        blamed = self._outlook.endless(self._outlook.classes(position.demand))
        return self._endless(job, blamed) if blamed else alone_ns

    def _endless(self, job: ClusterJob, other: int) -> UnknownStart:
        """Nobody can say when one that holds what a job needs ends."""
        known = self._view.jobs[other].spec
        code = "holder_late" if known.time_limit_ns or known.expected.steps else "holder_endless"
        return UnknownStart(job.id, Unknown.OTHERS_RUN_ON, reason(code, job=other))

    def _alone_ns(self, job: ClusterJob, position: QueuePosition) -> int | None:
        """The earliest start if nothing else is started but what was promised before it."""
        view, bound = self._view, position.demand.bound_ns
        others: list[int] = []
        for number, promise in self._promises.by_job.items():
            late = bound is None or view.now_ns + bound > promise.empty_ns
            if number == job.id or not late or not self.has(number):
                continue
            if promise.firm or self.position(view.jobs[number]).place < position.place:
                others.append(number)
        key = (*position.demand.key[:-2], job.spec.team, *others)
        if key not in self._alone:
            request = structs.replace(least_of(position.demand), job=job.id)
            found = promise_start(self._index, view, job, request, others, firm=False)
            self._alone[key] = None if found is None else found.start_ns
        return self._alone[key]

    def _no_nodes(self, job: ClusterJob, demand: Demand) -> UnknownStart:
        """Why nobody can say when there are nodes for a job."""
        fleet, free_index = self._view.fleet, free_index_of(self._view.fleet)
        fitting = 0
        for number in self._outlook.classes(demand):
            fitting |= free_index.members[number]
        found = place(fleet, least_of(demand))
        problem = found.reason if isinstance(found, PlacementRefusal) else None
        if not fitting & ~free_index.healthy:
            return _no_end(job, problem)
        there = (fitting & free_index.healthy).bit_count()
        facts = {"there": there, "fitting": fitting.bit_count()}
        why = reason("nodes_away", problem=str(problem), **facts)
        return UnknownStart(job.id, Unknown.NO_NODES, why)


def no_capacity(problem: str, ahead: int) -> Obstacle:
    """There are no nodes for a job that has so many others before it."""
    why = reason("waits_for_room", problem=problem, ahead=ahead)
    return Obstacle(Way.NO_ROOM, why, problem, ahead)


def _limits(lane: Lane) -> tuple[tuple[Limited, str], ...]:
    """The limits that jobs of a lane may come up against."""
    return (Limited.TEAM, lane.team), (Limited.QOS, lane.qos)


def _limit_endless(job: ClusterJob, gate: AtLimit | None) -> UnknownStart:
    told = "what is saved for another will be free" if gate is None else str(gate.reason)
    why = reason("limit_endless", problem=told)
    return UnknownStart(job.id, Unknown.OTHERS_RUN_ON, why)


def _no_end(job: ClusterJob, problem: Reason | None) -> UnknownStart:
    told = "its turn will come" if problem is None else str(problem)
    return UnknownStart(job.id, Unknown.NO_NODES, reason("no_end", problem=told))
