"""When it is a job's turn for GPUs: what becomes free, and what is wanted before it.

Counts alone: which nodes they are is for placement.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

import numpy as np
from msgspec import structs

from phalanx.cluster.forecast.supply import Supply, Wanted
from phalanx.cluster.jobs.horizon import NEVER_NS, likely_end_ns
from phalanx.cluster.node import NodeState
from phalanx.cluster.placement.choose import never_fits
from phalanx.cluster.placement.free_index import free_index_of
from phalanx.cluster.placement.request import PlacementRequest
from phalanx.cluster.queue.holdings import Holdings, Limited
from phalanx.cluster.queue.pending import Demand, Entry, Lane, PendingJobs, Priorities
from phalanx.cluster.state import View
from phalanx.cluster.units import SECOND_NS

ORDERED_AFTER = 16  # questions: from then on the whole line is put in order, once

OrderKey = tuple[int, int, int]  # in the line: -priority, queued_ns, job
Group = tuple[str, str]  # team and class of service
ANYBODY: Group = ("", "")  # whom no limit holds back
# Team, class and length as in ``Wanted``; classes of nodes that would do; the least GPUs.
LineKey = tuple[tuple[str, str, int], tuple[int, ...], int]


class Outlook:
    """Supply and demand at one moment."""

    def __init__(
        self, waiting: PendingJobs, holdings: Holdings, view: View, ranks: Priorities
    ) -> None:
        self._waiting, self._holdings = waiting, holdings
        self._view, self._ranks = view, ranks
        self._by_classes: dict[tuple[int, ...], Supply] = {}
        self._by_limit: dict[tuple[Limited, str], Supply] = {}
        self._limits: dict[Group, tuple[int | None, int]] = {}
        self._hopeless: dict[int, bool] = {}  # by demand
        self._asked = 0
        # Places in order, and sums of GPUs and of work up to each.
        self._lines: dict[LineKey, tuple[list[OrderKey], list[int], list[int]]] = {}
        self._counted: list[OrderKey] = []
        self._found: tuple[OrderKey | None, list[tuple[Demand, Lane, int]]] = (None, [])

    def classes(self, demand: Demand) -> tuple[int, ...]:
        """Classes of nodes that would do for a demand."""
        return demand.group.suiting(free_index_of(self._view.fleet), len(self._view.fleet.classes))

    def jobs_ahead(self, mine: OrderKey) -> int:
        """Jobs before a place."""
        if self._counted:
            return bisect_left(self._counted, mine)
        return sum(jobs for _, _, jobs in self._before(mine))

    def capacity_ns(self, mine: OrderKey, demand: Demand) -> int | None:
        """When the fleet has GPUs for a job and for all that come before it; None: never.

        Either all of them fit beside what still runs, or those before it begin as fast as GPUs
        become free: the sooner of both. What limits hold back is in nobody's way.
        """
        supply = self._of_fleet(self.classes(demand))
        ahead = self._ahead(mine, demand)
        gpus, limits = 0, {}
        wanted: dict[Group, int] = {}
        for (team, qos, _), (more, _) in ahead.items():
            wanted[team, qos] = wanted.get((team, qos), 0) + more
        for group, count in wanted.items():
            most, held = self._limit(group)
            gpus += count if most is None else min(count, max(0, most - held))
            if most is not None:
                limits[group] = most
        return supply.started_ns(demand.least_gpus, gpus, ahead, limits)

    def limit_ns(self, mine: OrderKey, demand: Demand, limit: Limited, name: str) -> int | None:
        """When a limit has room for a job, behind those before it under it."""
        supply = self._of_limit(limit, name)
        field = 0 if limit is Limited.TEAM else 1
        ahead = {
            key: wanted for key, wanted in self._ahead(mine, demand).items() if key[field] == name
        }
        gpus = sum(gpus for gpus, _ in ahead.values())
        return supply.started_ns(demand.least_gpus, gpus, ahead, {})

    def limited(self, limit: Limited, name: str) -> bool:
        """Whether there is a limit for a team or a class of service."""
        if limit is Limited.TEAM:
            quota = self._view.quotas.get(name)
            return quota is not None and quota.ceiling > 0
        rule = self._view.policy.queue.qos.get(name)
        return rule is not None and rule.most_gpus > 0

    def _ahead(self, mine: OrderKey, demand: Demand) -> Wanted:
        """What jobs before a place want that a job with this demand would use.

        Those alone that need no more than it, where jobs may overtake others: it starts on what
        is too little for larger ones, and what was promised to one of them is taken off elsewhere.
        """
        self._asked += 1
        classes = self.classes(demand)
        overtakes = self._view.policy.queue.backfill_depth > 0
        most_gpus = demand.least_gpus if overtakes else self._view.fleet.total_gpus
        if self._asked >= ORDERED_AFTER:
            return self._ahead_in_order(mine, classes, most_gpus)
        ahead: Wanted = {}
        wanted: dict[Demand, bool] = {}
        for other, lane, jobs in self._before(mine):
            if other not in wanted:
                wanted[other] = other.least_gpus <= most_gpus and self._wants(other, classes)
            if not wanted[other]:
                continue
            group, most = self._group(lane)
            if most is None or other.least_gpus <= most:
                seconds = _seconds(other)
                key = (*group, seconds.bit_length())
                gpus, work = ahead.get(key, (0, 0))
                each = jobs * other.gpus
                ahead[key] = (gpus + each, work + each * seconds)
        return ahead

    def _ahead_in_order(self, mine: OrderKey, classes: tuple[int, ...], most_gpus: int) -> Wanted:
        """The same from a line that was put in order once."""
        if not self._counted:
            self._put_in_order()
        ahead: Wanted = {}
        for (key, theirs, least), (places, all_gpus, all_work) in self._lines.items():
            if least > most_gpus or not _meet(theirs, classes):
                continue
            jobs = bisect_left(places, mine)
            if jobs:
                gpus, work = ahead.get(key, (0, 0))
                ahead[key] = (gpus + all_gpus[jobs], work + all_work[jobs])
        return ahead

    def _put_in_order(self) -> None:
        rows: dict[LineKey, list[tuple[OrderKey, int, int]]] = {}
        for demand in self._waiting.demands.values():
            classes = self.classes(demand)
            wanted = self._wants(demand, classes)
            gpus, seconds = demand.gpus, _seconds(demand)
            for lane, entries in demand.lanes.items():
                of = self._ranks.of
                places = [(-of(lane, queued, gpus), queued, job) for queued, job in entries]
                self._counted += places
                group, most = self._group(lane)
                if wanted and (most is None or demand.least_gpus <= most):
                    kind = (*group, seconds.bit_length())
                    row = rows.setdefault((kind, classes, demand.least_gpus), [])
                    row += [(place, gpus, gpus * seconds) for place in places]
        self._counted.sort()
        for key, row in rows.items():
            row.sort()
            self._lines[key] = (
                [place for place, _, _ in row],
                list(accumulate((gpus for _, gpus, _ in row), initial=0)),
                list(accumulate((work for _, _, work in row), initial=0)),
            )

    def _wants(self, demand: Demand, classes: tuple[int, ...]) -> bool:
        """Whether jobs with a demand can have, and would use, nodes of some classes."""
        theirs = self.classes(demand)
        if not _meet(theirs, classes):
            return False
        hopeless = self._hopeless.get(id(demand))
        if hopeless is None:
            fleet = self._view.fleet
            why = never_fits(fleet, free_index_of(fleet), least_of(demand), theirs)
            hopeless = self._hopeless[id(demand)] = why is not None
        return not hopeless

    def _before(self, mine: OrderKey) -> list[tuple[Demand, Lane, int]]:
        """How many in each lane come before a place, by what they ask for; the last is kept."""
        if self._found[0] != mine:
            before: list[tuple[Demand, Lane, int]] = []
            for demand in self._waiting.demands.values():
                for lane, entries in demand.lanes.items():
                    jobs = self._count(mine, demand, lane, entries)
                    if jobs:
                        before.append((demand, lane, jobs))
            self._found = (mine, before)
        return self._found[1]

    def _count(self, mine: OrderKey, demand: Demand, lane: Lane, entries: list[Entry]) -> int:
        """How many of those who wait in one lane for the same come before a place."""
        of, gpus = self._ranks.of, demand.gpus
        queued, job = entries[-1]
        if (-of(lane, queued, gpus), queued, job) < mine:
            return len(entries)  # often all or none of a lane do
        low, high = 0, len(entries) - 1
        middle = 0
        while low < high:
            queued, job = entries[middle]
            before = (-of(lane, queued, gpus), queued, job) < mine
            low, high = (middle + 1, high) if before else (low, middle)
            middle = (low + high) // 2
        return low

    def _group(self, lane: Lane) -> tuple[Group, int | None]:
        """(whose demand that of a lane is added to, what they may hold together)."""
        group = (lane.team, lane.qos)
        most, _ = self._limit(group)
        return (group if most is not None else ANYBODY), most

    def _limit(self, group: Group) -> tuple[int | None, int]:
        """(the most that jobs of a group may hold, what counts towards it); None: any number."""
        limit = self._limits.get(group)
        if limit is None:
            team, qos = group
            quota, rule = self._view.quotas.get(team), self._view.policy.queue.qos.get(qos)
            limits: list[tuple[int, int]] = []
            if quota is not None and quota.ceiling:
                limits.append((quota.ceiling, self._holdings.of_team(team)))
            if rule is not None and rule.most_gpus:
                limits.append((rule.most_gpus, self._holdings.of_qos(qos)))
            limit = self._limits[group] = min(limits, default=(None, 0))
        return limit

    def _of_fleet(self, classes: tuple[int, ...]) -> Supply:
        """GPUs of nodes of some classes."""
        supply = self._by_classes.get(classes)
        if supply is None:
            view, fleet = self._view, self._view.fleet
            if len(classes) == len(fleet.classes):
                free = fleet.idle_gpus[NodeState.HEALTHY]
                ends = [(self.end_ns(job), gpus) for job, gpus in fleet.job_gpus.items()]
            else:
                columns = fleet.columns
                mine = np.isin(columns.node_class, classes) & (columns.state == NodeState.HEALTHY)
                free = int(columns.free_gpus[mine].sum())
                ends = [
                    (self.end_ns(job), gpus)
                    for job, gpus in fleet.job_gpus.items()
                    if self._stands_on(job, classes)
                ]
            supply = self._by_classes[classes] = Supply(view.now_ns, free, ends)
        return supply

    def end_ns(self, number: int) -> int:
        """When a running job will probably be gone; NEVER_NS: nobody can say."""
        known = self._view.jobs.get(number)
        found = None if known is None else likely_end_ns(self._view, known)
        return NEVER_NS if found is None else found

    def endless(self, classes: tuple[int, ...]) -> int:
        """A job that holds nodes of some classes and of which nobody can say when it ends; 0: none.

        The one with most GPUs is named.
        """
        holders = [
            (gpus, -number)
            for number, gpus in self._view.fleet.job_gpus.items()
            if self.end_ns(number) == NEVER_NS and self._stands_on(number, classes)
        ]
        return -max(holders, default=(0, 0))[1]

    def endless_ahead(self, mine: OrderKey) -> int:
        """The first job in line before a place that may run for any time; 0: none."""
        assumed = self._view.policy.queue.unbounded_ns
        endless: list[OrderKey] = []
        for demand, lane, _ in self._before(mine):
            if demand.bound_ns is None and demand.length_ns == assumed:
                queued, job = demand.lanes[lane][0]
                endless.append((-self._ranks.of(lane, queued, demand.gpus), queued, job))
        return min(endless)[2] if endless else 0

    def _stands_on(self, job: int, classes: tuple[int, ...]) -> bool:
        """Whether a running job's first node is of one of some classes; gangs rarely mix them."""
        running = self._view.jobs.get(job)
        if running is None or running.placement is None:
            return False
        return self._view.fleet.class_of(running.placement.nodes[0]) in classes

    def _of_limit(self, limit: Limited, name: str) -> Supply:
        """What a team's ceiling, or the limit of a class of service, leaves."""
        supply = self._by_limit.get((limit, name))
        if supply is None:
            view, holdings = self._view, self._holdings
            if limit is Limited.TEAM:
                left = view.quotas[name].ceiling - holdings.of_team(name)
            else:
                left = view.policy.queue.qos[name].most_gpus - holdings.of_qos(name)
            held = holdings.of_jobs_under(limit, name)
            ends = [(self.end_ns(job), gpus) for job, gpus in held]
            supply = self._by_limit[(limit, name)] = Supply(view.now_ns, left, ends)
        return supply


def least_of(demand: Demand) -> PlacementRequest:
    """The smallest gang that a demand starts with."""
    asked = demand.request
    return structs.replace(asked, replicas=min(asked.shape.floor, asked.replicas), spares=0)


def _seconds(demand: Demand) -> int:
    """How long jobs with a demand hold their nodes."""
    return -(-demand.length_ns // SECOND_NS)


def _meet(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return one == other or any(number in other for number in one)
