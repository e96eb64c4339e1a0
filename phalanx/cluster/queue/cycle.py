"""One look at the queue: who starts, who is promised a start, who leaves for whom.

First jobs start in order of priority, until some have no room: they are promised a start and
nodes, or others are asked to leave for them. Then jobs behind start where they are in nobody's
way: on other nodes, or on promised ones if they are sure to be gone in time.
"""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.jobs.horizon import leave_ns
from phalanx.cluster.jobs.job import ClusterJob, Placement
from phalanx.cluster.placement.choose import place_elastic
from phalanx.cluster.placement.free_index import Nodes, free_index_of, set_of_nodes
from phalanx.cluster.queue import windows
from phalanx.cluster.queue.claims import (
    collected,
    collector,
    evict,
    leave_for_windows,
    promise_start,
    why_leave,
)
from phalanx.cluster.queue.decisions import Decision, Preempt, Reserved, Resize, Start, why_starts
from phalanx.cluster.queue.index import QueueIndex
from phalanx.cluster.queue.pending import (
    UNBOUNDED_NS,
    Demand,
    DemandGroup,
    Lane,
    PriorityOrder,
    Stays,
)
from phalanx.cluster.queue.preemption import Eviction
from phalanx.cluster.queue.promises import GangChecks, overtaken, yield_to_higher
from phalanx.cluster.state import View

MOST_STARTS = 1_000  # in one pass: the rest starts in the next, and others are heard between
NO_STAY = Stays(-1)  # of jobs that have no room, however short they are
MOST_HOPELESS = 8  # demands without any prospect that do not keep the next job from a promise


class Pass:
    """The work of one ``schedule``."""

    def __init__(self, index: QueueIndex, view: View) -> None:
        self._index, self._view = index, view
        self._waiting, self._promises = index.waiting, index.promises
        self._policy = view.policy.queue
        self._ranks = index.ranks(view)
        self.unfinished = False  # it stopped before it had come to all jobs
        self._decisions: list[Decision] = []
        self._leaving: dict[int, None] = {}  # jobs that were told to in this pass
        yield_to_higher(view, self._waiting, self._promises)
        # Promises that bind in this pass: firm ones from the start, others when it comes to them.
        # One for which others were asked to leave is void when they should have been gone, and one
        # that waits for the rest of its nodes when it has waited long enough.
        self._bind: dict[int, None] = {
            number: None
            for number, one in self._promises.by_job.items()
            if one.firm and (not (one.asked or one.waits) or self._promises.hold(view, one))
        }
        self._collector = 0  # the job that gets every node that becomes free; 0: none does
        self._collected: Nodes = 0
        self._saved = index.limits.saved_for(view)  # by limit: the job that starves under it
        self._kept: dict[int | None, Nodes] = {}  # by bound: what ``_bind`` closes
        self._checks = GangChecks(view, index.promises)
        # By what is asked for: closed nodes without which it fails.
        self._without_capacity: dict[DemandGroup, list[Nodes]] = {}

    def run(self) -> list[Decision]:
        """All decisions, in order."""
        self._decisions += leave_for_windows(self._index, self._view, self._leaving)
        self._complete()
        self._collect()
        self._in_order()
        self.unfinished = len(self._decisions) >= MOST_STARTS
        if self.unfinished:
            return self._decisions
        self._starving()
        for number in list(self._promises.by_job):
            if number not in self._bind:
                self._promises.drop(number)
        if self._policy.backfill_depth:
            self._backfill()
        return self._decisions

    def _complete(self) -> None:
        """Whoever holds the most of its nodes, and waited for the rest, comes before all others."""
        for number in [one.job for one in self._promises.by_job.values() if one.waits]:
            lane, demand, _ = self._waiting.where[number]
            if not self._gated(number, lane, demand):
                self._try(self._view.jobs[number], lane, demand)

    def _collect(self) -> None:
        """Whoever has waited far too long gets what becomes free, one by one."""
        view = self._view
        number = self._collector = collector(self._index, view, self._saved)
        if not number:
            return
        lane, demand, _ = self._waiting.where[number]
        if not self._try(view.jobs[number], lane, demand):
            self._collected = collected(self._waiting, view, number) & ~self._leaving_for_others()

    def _gated(self, number: int, lane: Lane, demand: Demand) -> bool:
        return self._index.limits.gated(self._view, number, lane, demand, self._saved)

    def _leaving_for_others(self) -> Nodes:
        """Nodes that others leave for somebody: not for the collector."""
        leaving = 0
        for number, promise in self._promises.by_job.items():
            if number != self._collector and promise.asked and number in self._bind:
                leaving |= self._promises.nodes(number)
        return leaving

    def _in_order(self) -> None:
        front = PriorityOrder(self._waiting, self._ranks)
        for lane in self._waiting.lanes.values():
            front.add(lane, lane.entries)
        left = max(1, self._policy.reservations)
        hopeless: dict[int, None] = {}  # demands that no end of what runs would make room for
        blocked: dict[tuple[int, str, str], list[int]] = {}  # jobs by demand, team and class
        looks = self._policy.backfill_depth
        while len(self._decisions) < MOST_STARTS and (found := front.pop()) is not None:
            number, lane, demand, source = found
            if id(demand) in hopeless:
                looks -= 1
                if looks < 0:
                    return
                front.go_on(source)
                continue
            alike = blocked.setdefault((id(demand), lane.team, lane.qos), [])
            waits = number not in self._promises.by_job and self._blocked_still(alike)
            if self._gated(number, lane, demand):
                continue  # its lane waits; what else it holds is looked at behind the others
            job = self._view.jobs[number]
            started = not waits and self._try(job, lane, demand)
            if not started:
                alike.append(number)
            if not started and not self._claims(job, demand):
                if self._reserve(job, demand, firm=False):
                    left -= 1
                else:
                    hopeless[id(demand)] = None
                if left == 0 or len(hopeless) == MOST_HOPELESS:
                    return
            front.go_on(source)

    def _blocked_still(self, alike: list[int]) -> bool:
        """Whether any of some jobs that had no room has none now; those that have are started.

        A promise may have gone to other nodes since. It kept them from jobs that have one too, and
        not from one behind that asks for the same: that would overtake them.
        """
        while alike:
            lane, demand, _ = self._waiting.where[alike[0]]
            job, gated = self._view.jobs[alike[0]], self._gated(alike[0], lane, demand)
            if gated or not self._try(job, lane, demand):
                return True
            del alike[0]
        return False

    def _backfill(self) -> None:
        promised, where = self._promises.by_job, self._waiting.where
        mine = [number for number in promised if number in where]
        groups = self._longest_stays()
        front = PriorityOrder(self._waiting, self._ranks)
        for number in mine:  # what is promised to one is not in its own way
            front.add(where[number][0], [(where[number][2], number)])
        for group, stays in groups.items():
            for lane, entries in group.lanes.items():
                held_ns = group.stays[lane]
                if held_ns[0] <= stays.longest_ns:  # others would not be looked at
                    front.add(lane, entries, stays, held_ns)
        looked = 0
        while looked < self._policy.backfill_depth and (found := front.pop()) is not None:
            number, lane, demand, source = found
            own = source < len(mine)
            stays = groups.get(demand.group, NO_STAY)
            if not own and (number in promised or demand.held_ns > stays.longest_ns):
                front.go_on(source)
                continue
            looked += 1
            if self._gated(number, lane, demand):
                continue
            started = self._try(self._view.jobs[number], lane, demand, backfilled=True)
            if own:
                continue
            if not started and not self._view.reservations:
                # Whoever asks for the same and stays as long fares no better, in any team.
                stays.longest_ns = demand.held_ns - 1
            front.go_on(source)

    def _longest_stays(self) -> dict[DemandGroup, Stays]:
        """How long a job may hold its nodes to have room for it beside what is promised.

        By what it asks for; groups that have no room at all are left out.
        """
        free_index, classes = free_index_of(self._view.fleet), len(self._view.fleet.classes)
        free: dict[tuple[tuple[int, ...], int], Nodes] = {}
        now = self._view.now_ns
        due = [self._promises.by_job[number].empty_ns - now for number in self._bind]
        stays: list[int | None] = [None, *sorted({max(0, at) for at in due}, reverse=True)]
        longest: dict[DemandGroup, Stays] = {}
        for group in self._waiting.groups.values():
            key = (group.suiting(free_index, classes), group.request.shape.slot_gpus)
            if key not in free:
                free[key] = free_index.with_free(*key)
            if free[key].bit_count() < group.least_slots:
                continue
            for stay in stays:
                if (free[key] & ~self._promised(stay)).bit_count() >= group.least_slots:
                    longest[group] = Stays(UNBOUNDED_NS if stay is None else stay)
                    break
        return longest

    def _promised(self, bound: int | None) -> Nodes:
        """Nodes that are promised before a job that holds its nodes so long would be gone."""
        promised = self._kept.get(bound)
        if promised is None:
            promised = self._collected
            for number in self._bind:
                promise = self._promises.by_job[number]
                if bound is None or self._view.now_ns + bound > promise.empty_ns:
                    promised |= self._promises.nodes(number)
            self._kept[bound] = promised
        return promised

    def _closed(self, job: ClusterJob, bound: int | None) -> Nodes:
        """Nodes that are not for a job."""
        now, promises = self._view.now_ns, self._promises.by_job
        if job.id == self._collector:
            closed = self._leaving_for_others()
        elif job.id not in promises:
            closed = self._promised(bound)
        else:
            # Those who were promised a start never push each other back. Who has no limit counts
            # as long as the others' promises assume, or two of them could wait for each other.
            length_ns = self._waiting.where[job.id][1].length_ns if bound is None else bound
            end_ns, closed = now + length_ns, self._collected
            for number, promise in promises.items():
                if number != job.id and end_ns > promise.empty_ns:
                    closed |= self._promises.nodes(number)
        if self._view.reservations:
            until_ns = None if bound is None else now + bound
            closed |= self._index.windows.closed_to(self._view, job.spec.team, until_ns)
        return closed

    def _binds(self, job: int, *, yes: bool = True) -> None:
        """From here on a promise binds all that follow, or no longer does."""
        self._kept.clear()
        if yes:
            self._bind[job] = None
        else:
            self._bind.pop(job, None)

    def _try(
        self, job: ClusterJob, lane: Lane, demand: Demand, *, backfilled: bool = False
    ) -> bool:
        """Starts a job if there is room for it, or has its nodes measured first."""
        if job.id in self._checks.waiting:
            return True
        bounds = [demand.bound_ns, *(self._shorter(demand) if backfilled else ())]
        for bound in bounds:
            placement = self._fitting(job, demand, bound)
            if placement is not None:
                break
        else:
            return False
        check = self._checks.wanted(job, placement)
        if check is not None:
            self._binds(job.id)
            self._decisions.append(check)
            return True
        if bound != demand.bound_ns and bound is not None:
            job.granted_ns = bound - leave_ns(self._view, job) + job.ran_ns
        priority = self._ranks.of(lane, job.queued_ns, demand.gpus)
        wanted = demand.request.replicas
        why = why_starts(placement, wanted, job.granted_ns, priority, backfilled=backfilled)
        if job.id in self._bind:
            self._binds(job.id, yes=False)
        self._index.start(self._view, job, placement)
        self._decisions.append(Start(job.id, placement, why))
        return True

    def _shorter(self, demand: Demand) -> list[int]:
        """Bounds that jobs accept below their own, longest first: up to a promise or a window."""
        now, longest = self._view.now_ns, demand.bound_ns or 0
        due = [self._promises.by_job[number].empty_ns - now for number in self._bind]
        due += [window.start_ns - now for window in windows.running(self._view)]
        return sorted({at for at in due if demand.held_ns <= at < longest}, reverse=True)

    def _fitting(self, job: ClusterJob, demand: Demand, bound: int | None) -> Placement | None:
        """A place for a job that would hold it so long; None: there is none."""
        closed = self._closed(job, bound)
        failed = self._without_capacity.setdefault(demand.group, [])
        if any(known & ~closed == 0 for known in failed):
            return None
        placement = self._place(job, demand, closed)
        if placement is None:
            failed.append(closed)
        return placement

    def _place(self, job: ClusterJob, demand: Demand, closed: Nodes) -> Placement | None:
        """A place for as many replicas as limits leave, or fewer, if it is elastic."""
        most = self._index.limits.most_replicas(self._view, job, demand)
        holders = set_of_nodes(job.kept.holders) if job.kept is not None else 0
        request = structs.replace(
            demand.request, job=job.id, closed=closed, replicas=most, holders=holders
        )
        return place_elastic(self._view.fleet, request)

    def _reserve(self, job: ClusterJob, demand: Demand, *, firm: bool) -> bool:
        """Promises a blocked job its start. False: nobody can say when there will be room."""
        old = self._promises.by_job.get(job.id)
        if old is not None and (old.firm or not firm) and self._promises.hold(self._view, old):
            self._binds(job.id)
            return True
        request = structs.replace(demand.request, job=job.id)
        promise = promise_start(self._index, self._view, job, request, self._bind, firm)
        if promise is None:
            self._promises.drop(job.id)
            self._binds(job.id, yes=False)
            return False
        self._promises.make(promise)
        self._binds(job.id)
        return True

    def _starving(self) -> None:
        """Jobs overtaken for too long get a promise that nobody overrides, few on the same nodes.

        Who has not run for the longest comes first, however long others waited before they ran.
        """
        waiting, jobs, fleet = self._waiting, self._view.jobs, self._view.fleet
        free_index, classes = free_index_of(fleet), len(fleet.classes)
        left: dict[tuple[int, ...], int] = {}  # by classes of nodes: promises that may be made
        hopeless = 0
        for _, number in overtaken(self._view, waiting):
            lane, demand, _ = waiting.where[number]
            wanted = demand.group.suiting(free_index, classes)
            left.setdefault(wanted, self._policy.starving_reservations)
            if not left[wanted] or self._gated(number, lane, demand):
                continue
            job = jobs[number]
            if self._claims(job, demand) or self._reserve(job, demand, firm=True):
                left[wanted] -= 1
            else:
                hopeless += 1
                if hopeless == MOST_HOPELESS:
                    return

    def _claims(self, job: ClusterJob, demand: Demand) -> bool:
        """Whether others leave for a job; asks them to, if it has the right."""
        tried_ns, now = self._index.state.tried_ns, self._view.now_ns
        old = self._promises.by_job.get(job.id)
        if old is not None and old.asked:
            if self._promises.hold(self._view, old):
                return True
            self._promises.drop(job.id)
            self._binds(job.id, yes=False)
        rule = self._policy.qos.get(job.spec.qos)
        may_ask = bool(self._view.quotas) or (rule is not None and rule.preempts)
        tried = tried_ns.get(job.id)
        if not may_ask or (tried is not None and now < tried + self._policy.replan_ns):
            return False
        request = structs.replace(
            demand.request, job=job.id, closed=self._closed(job, demand.bound_ns)
        )
        eviction = evict(
            self._index, self._view, job, request, self._ranks, demand.gpus, self._leaving
        )
        if eviction is None:
            tried_ns[job.id] = now
            return False
        self._ask(job, eviction, demand.gpus)
        return True

    def _ask(self, job: ClusterJob, eviction: Eviction, gpus: int) -> None:
        grace, now = self._policy.grace_ns, self._view.now_ns
        for offer in eviction.offers:
            self._leaving[offer.job] = None
            why = why_leave(self._index, self._view, job, offer, self._ranks, gpus)
            if offer.replicas:
                self._decisions.append(Resize(offer.job, offer.replicas, why))
            else:
                self._decisions.append(Preempt(offer.job, job.id, grace, why))
        self._promises.make(
            Reserved(
                job=job.id,
                start_ns=now + grace,
                nodes=eviction.nodes,
                made_ns=now,
                firm=True,
                asked=tuple(offer.job for offer in eviction.offers),
            )
        )
        self._binds(job.id)
