"""How soon GPUs come free, and how much of them is wanted before a job's turn.

Counts alone: which nodes they are is for placement. Supply is what runs, by its ends; demand is the
line before a job, by GPUs and by work. Times within are integer milliseconds: their products with
GPUs stay within 64 bits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from phalanx.cluster.fleet import NodeState
from phalanx.cluster.horizon import NEVER_NS
from phalanx.cluster.placement import never_fits
from phalanx.cluster.request import Request
from phalanx.cluster.room import room_of
from phalanx.cluster.state import View
from phalanx.cluster.waiting import Demand, Entry, Lane, Ranks

if TYPE_CHECKING:
    from phalanx.cluster.queue import Queue

MS = 1_000_000
ORDERED_AFTER = 16  # questions: from then on the whole line is put in order, once
ROUNDS = 3  # in which what limits hold back is found

Place = tuple[int, int, int]  # in the line: -priority, queued_ns, job
Group = tuple[str, str]  # team and class of service
Ahead = dict[Group, tuple[int, int]]  # GPUs and GPU-milliseconds wanted before a place


class Supply:
    """GPUs that become free as what runs ends."""

    def __init__(self, now_ns: int, free: int, ends: Iterable[tuple[int, int]]) -> None:
        self._now_ns = now_ns
        known = sorted((max(end, now_ns), gpus) for end, gpus in ends if end < NEVER_NS)
        self._ends = [now_ns, *(end for end, _ in known)]
        self._free = list(accumulate((gpus for _, gpus in known), initial=free))
        times = np.asarray(self._ends, np.int64) // MS
        rates = np.maximum(np.asarray(self._free, np.int64), 0)
        # By the time of each end: what those GPUs could have done since now.
        self._done = np.concatenate(([0], np.cumsum(rates[:-1] * np.diff(times))))

    def free_ns(self, gpus: int) -> int | None:
        """When so many are free at a time; None: never."""
        found = bisect_left(self._free, gpus)
        return self._ends[found] if found < len(self._ends) else None

    def done_ns(self, work_ms: int) -> int | None:
        """When they could have done so much work, however it is divided; None: never."""
        if work_ms <= 0:
            return self._now_ns
        last = int(np.searchsorted(self._done, min(work_ms, 2**62))) - 1
        rate = max(0, self._free[last])
        if not rate:
            return None
        return self._ends[last] + -(-(work_ms - int(self._done[last])) // rate) * MS


class Outlook:
    """Supply and demand at one moment."""

    def __init__(self, queue: Queue, view: View, ranks: Ranks) -> None:
        self._queue, self._view, self._ranks = queue, view, ranks
        self._supplies: dict[tuple[str, str | tuple[int, ...]], Supply] = {}
        self._limits: dict[Group, tuple[int | None, int]] = {}
        self._hopeless: dict[int, bool] = {}  # by demand
        self._asked = 0
        # By group and classes of nodes: places in order, and sums up to each.
        self._lines: dict[
            tuple[Group, tuple[int, ...]], tuple[list[Place], list[int], list[int]]
        ] = {}
        self._counted: list[Place] = []

    def classes(self, demand: Demand) -> tuple[int, ...]:
        """Classes of nodes that would do for a demand."""
        return demand.suiting(room_of(self._view.fleet), len(self._view.fleet.classes))

    def jobs_ahead(self, mine: Place) -> int:
        """Jobs before a place."""
        if self._counted:
            return bisect_left(self._counted, mine)
        return sum(
            self._before(mine, demand, lane, entries)
            for demand in self._queue.waiting.demands.values()
            for lane, entries in demand.lanes.items()
        )

    def room_ns(self, mine: Place, demand: Demand) -> int | None:
        """When the fleet has GPUs for a job and for all that come before it; None: never.

        Either all of them fit beside what still runs, or the work before it is done as fast as
        GPUs become free: the sooner of both. What limits hold back is in nobody's way.
        """
        classes = self.classes(demand)
        supply = self._of_fleet(classes)
        ahead = self._ahead(mine, classes)
        now_ns = self._view.now_ns
        need = demand.least_gpus
        for group, (gpus, _) in ahead.items():
            most, held = self._limit(group)
            need += gpus if most is None else min(gpus, max(0, most - held))
        at_ns = supply.free_ns(need)
        done_ns = supply.done_ns(sum(work for _, work in ahead.values()))
        for _ in range(ROUNDS):
            if done_ns is None:
                break
            span = (done_ns - now_ns) // MS
            work = 0
            for group, (_, wanted) in ahead.items():
                most, _ = self._limit(group)
                work += wanted if most is None else min(wanted, most * span)
            done_ns = supply.done_ns(work)
        return _sooner(at_ns, done_ns)

    def limit_ns(self, mine: Place, demand: Demand, limit: str, name: str) -> int | None:
        """When a limit ("team" or "qos") has room for a job, behind those before it under it."""
        supply = self._of_limit(limit, name)
        alone_ns = supply.free_ns(demand.least_gpus)
        if alone_ns is None:
            return None
        place = 0 if limit == "team" else 1
        ahead = [
            wanted
            for group, wanted in self._ahead(mine, self.classes(demand)).items()
            if group[place] == name
        ]
        fit_ns = supply.free_ns(demand.least_gpus + sum(gpus for gpus, _ in ahead))
        found = _sooner(fit_ns, supply.done_ns(sum(work for _, work in ahead)))
        return None if found is None else max(alone_ns, found)

    def limited(self, limit: str, name: str) -> bool:
        """Whether there is a limit for a team or a class of service."""
        if limit == "team":
            quota = self._view.quotas.get(name)
            return quota is not None and quota.ceiling > 0
        rule = self._view.policy.queue.qos.get(name)
        return rule is not None and rule.most_gpus > 0

    def _ahead(self, mine: Place, classes: tuple[int, ...]) -> Ahead:
        """What jobs before a place want of some classes of nodes, those that can have it."""
        self._asked += 1
        if self._asked >= ORDERED_AFTER:
            return self._ahead_in_order(mine, classes)
        found: Ahead = {}
        for demand in self._queue.waiting.demands.values():
            if not self._wants(demand, classes):
                continue
            for lane, entries in demand.lanes.items():
                group = (lane.team, lane.qos)
                jobs = self._before(mine, demand, lane, entries)
                most, _ = self._limit(group)
                if jobs and (most is None or demand.least_gpus <= most):
                    gpus, work = found.get(group, (0, 0))
                    each = demand.gpus
                    length_ms = demand.length_ns // MS
                    found[group] = (gpus + jobs * each, work + jobs * each * length_ms)
        return found

    def _ahead_in_order(self, mine: Place, classes: tuple[int, ...]) -> Ahead:
        """The same from a line that was put in order once."""
        if not self._counted:
            self._put_in_order()
        found: Ahead = {}
        for (group, theirs), (places, all_gpus, all_work) in self._lines.items():
            if theirs != classes and not any(number in classes for number in theirs):
                continue
            jobs = bisect_left(places, mine)
            if jobs:
                gpus, work = found.get(group, (0, 0))
                found[group] = (gpus + all_gpus[jobs], work + all_work[jobs])
        return found

    def _put_in_order(self) -> None:
        rows: dict[tuple[Group, tuple[int, ...]], list[tuple[Place, int, int]]] = {}
        for demand in self._queue.waiting.demands.values():
            classes = self.classes(demand)
            wanted = self._wants(demand, classes)
            gpus, work = demand.gpus, demand.gpus * (demand.length_ns // MS)
            for lane, entries in demand.lanes.items():
                of = self._ranks.of
                places = [(-of(lane, queued, gpus), queued, job) for queued, job in entries]
                self._counted += places
                most, _ = self._limit((lane.team, lane.qos))
                if wanted and (most is None or demand.least_gpus <= most):
                    row = rows.setdefault(((lane.team, lane.qos), classes), [])
                    row += [(place, gpus, work) for place in places]
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
        if theirs != classes and not any(number in classes for number in theirs):
            return False
        found = self._hopeless.get(id(demand))
        if found is None:
            fleet = self._view.fleet
            why = never_fits(fleet, room_of(fleet), least_of(demand), theirs)
            found = self._hopeless[id(demand)] = why is not None
        return not found

    def _before(self, mine: Place, demand: Demand, lane: Lane, entries: list[Entry]) -> int:
        """How many of those who wait in one lane for the same come before a place."""
        low, high = 0, len(entries)
        while low < high:
            middle = (low + high) // 2
            queued, job = entries[middle]
            before = (-self._ranks.of(lane, queued, demand.gpus), queued, job) < mine
            low, high = (middle + 1, high) if before else (low, middle)
        return low

    def _limit(self, group: Group) -> tuple[int | None, int]:
        """(the most that jobs of a group may hold, what counts towards it); None: any number."""
        found = self._limits.get(group)
        if found is None:
            team, qos = group
            quota, rule = self._view.quotas.get(team), self._view.policy.queue.qos.get(qos)
            known: list[tuple[int, int]] = []
            if quota is not None and quota.ceiling:
                known.append((quota.ceiling, self._queue.state.held.get(team, 0)))
            if rule is not None and rule.most_gpus:
                known.append((rule.most_gpus, self._queue.qos_gpus.get(qos, 0)))
            found = self._limits[group] = min(known, default=(None, 0))
        return found

    def _of_fleet(self, classes: tuple[int, ...]) -> Supply:
        """GPUs of nodes of some classes."""
        found = self._supplies.get(("fleet", classes))
        if found is None:
            view, fleet = self._view, self._view.fleet
            end_ns = self._queue.horizon(view).end_ns
            if len(classes) == len(fleet.classes):
                free = fleet.idle_gpus[NodeState.HEALTHY]
                ends = [(end_ns(view, job), gpus) for job, gpus in fleet.job_gpus.items()]
            else:
                columns = fleet.columns
                mine = np.isin(columns.node_class, classes) & (columns.state == NodeState.HEALTHY)
                free = int(columns.free_gpus[mine].sum())
                ends = [
                    (end_ns(view, job), gpus)
                    for job, gpus in fleet.job_gpus.items()
                    if self._stands_on(job, classes)
                ]
            found = self._supplies[("fleet", classes)] = Supply(view.now_ns, free, ends)
        return found

    def _stands_on(self, job: int, classes: tuple[int, ...]) -> bool:
        """Whether a running job's first node is of one of some classes; gangs rarely mix them."""
        known = self._view.jobs.get(job)
        if known is None or known.placement is None:
            return False
        return self._view.fleet.class_of(known.placement.nodes[0]) in classes

    def _of_limit(self, limit: str, name: str) -> Supply:
        """What a team's ceiling, or the limit of a class of service, leaves."""
        found = self._supplies.get((limit, name))
        if found is None:
            view, queue = self._view, self._queue
            if limit == "team":
                left = view.quotas[name].ceiling - queue.state.held.get(name, 0)
            else:
                left = view.policy.queue.qos[name].most_gpus - queue.qos_gpus.get(name, 0)
            end_ns = queue.horizon(view).end_ns
            ends = [(end_ns(view, job), gpus) for job, gpus in queue.holders(limit, name)]
            found = self._supplies[(limit, name)] = Supply(view.now_ns, left, ends)
        return found


def least_of(demand: Demand) -> Request:
    """The smallest gang that a demand starts with."""
    asked = demand.request
    return structs.replace(asked, replicas=min(asked.shape.floor, asked.replicas), spares=0)


def _sooner(one_ns: int | None, other_ns: int | None) -> int | None:
    return min((at for at in (one_ns, other_ns) if at is not None), default=None)
