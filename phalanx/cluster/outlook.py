"""How soon GPUs come free, and how much of them is wanted before a job's turn.

Counts alone: which nodes they are is for placement. Supply is what runs, by its ends; demand is the
line before a job, by GPUs and by work. Times within are integer milliseconds: their products with
GPUs stay within 64 bits.
"""

from __future__ import annotations

from bisect import bisect_left
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

    def __init__(self, now_ns: int, free: int, ends: list[tuple[int, int]]) -> None:
        known = np.asarray(ends, np.int64).reshape(-1, 2)
        known = known[known[:, 0] < NEVER_NS]
        known = known[np.argsort(known[:, 0], kind="stable")]
        self._ends = np.concatenate(([now_ns], np.maximum(known[:, 0], now_ns)))
        self._free = np.cumsum(np.concatenate(([free], known[:, 1])))
        rates = np.maximum(self._free, 0)
        # By the time of each end: what those GPUs could have done since now.
        self._done = np.concatenate(([0], np.cumsum(rates[:-1] * np.diff(self._ends // MS))))

    def free_ns(self, gpus: int) -> int | None:
        """When so many are free at a time; None: never."""
        found = int(np.searchsorted(self._free, gpus))
        return int(self._ends[found]) if found < len(self._ends) else None

    def done_ns(self, work_ms: int) -> int | None:
        """When they could have done so much work, however it is divided; None: never."""
        if work_ms <= 0:
            return int(self._ends[0])
        last = int(np.searchsorted(self._done, min(work_ms, 2**62))) - 1
        rate = max(0, int(self._free[last]))
        if not rate:
            return None
        return int(self._ends[last]) + -(-(work_ms - int(self._done[last])) // rate) * MS


class Outlook:
    """Supply and demand at one moment."""

    def __init__(self, queue: Queue, view: View, ranks: Ranks) -> None:
        self._queue, self._view, self._ranks = queue, view, ranks
        self._supplies: dict[tuple[str, str | tuple[int, ...]], Supply] = {}
        self._limits: dict[Group, tuple[int | None, int]] = {}
        self._hopeless: dict[int, bool] = {}  # by demand
        self._asked = 0
        # By group, classes of nodes and least GPUs: places in order, and sums up to each.
        self._lines: dict[
            tuple[Group, tuple[int, ...], int], tuple[list[Place], list[int], list[int]]
        ] = {}
        self._counted: list[Place] = []
        self._found: tuple[Place | None, list[tuple[Demand, Lane, int]]] = (None, [])

    def classes(self, demand: Demand) -> tuple[int, ...]:
        """Classes of nodes that would do for a demand."""
        return demand.suiting(room_of(self._view.fleet), len(self._view.fleet.classes))

    def jobs_ahead(self, mine: Place) -> int:
        """Jobs before a place."""
        if self._counted:
            return bisect_left(self._counted, mine)
        return sum(jobs for _, _, jobs in self._before(mine))

    def room_ns(self, mine: Place, demand: Demand) -> int | None:
        """When the fleet has GPUs for a job and for all that come before it; None: never.

        Either all of them fit beside what still runs, or the work before it is done as fast as
        GPUs become free: the sooner of both. What limits hold back is in nobody's way.
        """
        classes = self.classes(demand)
        supply = self._of_fleet(classes)
        ahead = self._ahead(mine, demand)
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
            wanted for group, wanted in self._ahead(mine, demand).items() if group[place] == name
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

    def _ahead(self, mine: Place, demand: Demand) -> Ahead:
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
        found: Ahead = {}
        wanted: dict[Demand, bool] = {}
        for other, lane, jobs in self._before(mine):
            if other not in wanted:
                wanted[other] = other.least_gpus <= most_gpus and self._wants(other, classes)
            if not wanted[other]:
                continue
            group = (lane.team, lane.qos)
            most, _ = self._limit(group)
            if most is None or other.least_gpus <= most:
                gpus, work = found.get(group, (0, 0))
                each = jobs * other.gpus
                found[group] = (gpus + each, work + each * (other.length_ns // MS))
        return found

    def _ahead_in_order(self, mine: Place, classes: tuple[int, ...], most_gpus: int) -> Ahead:
        """The same from a line that was put in order once."""
        if not self._counted:
            self._put_in_order()
        found: Ahead = {}
        for (group, theirs, least), (places, all_gpus, all_work) in self._lines.items():
            if least > most_gpus or not _meet(theirs, classes):
                continue
            jobs = bisect_left(places, mine)
            if jobs:
                gpus, work = found.get(group, (0, 0))
                found[group] = (gpus + all_gpus[jobs], work + all_work[jobs])
        return found

    def _put_in_order(self) -> None:
        rows: dict[tuple[Group, tuple[int, ...], int], list[tuple[Place, int, int]]] = {}
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
                    key = ((lane.team, lane.qos), classes, demand.least_gpus)
                    row = rows.setdefault(key, [])
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
        if not _meet(theirs, classes):
            return False
        found = self._hopeless.get(id(demand))
        if found is None:
            fleet = self._view.fleet
            why = never_fits(fleet, room_of(fleet), least_of(demand), theirs)
            found = self._hopeless[id(demand)] = why is not None
        return not found

    def _before(self, mine: Place) -> list[tuple[Demand, Lane, int]]:
        """How many in each lane come before a place, by what they ask for; the last is kept."""
        if self._found[0] != mine:
            found: list[tuple[Demand, Lane, int]] = []
            for demand in self._queue.waiting.demands.values():
                for lane, entries in demand.lanes.items():
                    jobs = self._count(mine, demand, lane, entries)
                    if jobs:
                        found.append((demand, lane, jobs))
            self._found = (mine, found)
        return self._found[1]

    def _count(self, mine: Place, demand: Demand, lane: Lane, entries: list[Entry]) -> int:
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


def _meet(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return one == other or any(number in other for number in one)
