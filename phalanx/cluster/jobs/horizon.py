"""When what runs will have ended: for each node, the times at which its GPUs become free.

Ends are those of time limits (plus the grace to leave), or else of the number of steps, or else
assumed. They are known when a job starts, so that an end never moves while the job runs.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from phalanx.cluster.fleet.columns import Column
from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.placement.free_index import Nodes, array_of, free_index_of
from phalanx.cluster.placement.request import PlacementRequest, tensor_slots
from phalanx.cluster.protocol.timeouts import derive
from phalanx.cluster.state import View

NEVER_NS = 2**62


def bound_ns(view: View, job: ClusterJob) -> int | None:
    """The longest that a job can hold nodes from its start on; None: nobody says."""
    return _bound_ns(view, job, job.time_limit_ns)


def least_bound_ns(view: View, job: ClusterJob) -> int | None:
    """The same if it gets the shortest limit that it accepts."""
    return _bound_ns(view, job, job.spec.time_min_ns or job.time_limit_ns)


def _bound_ns(view: View, job: ClusterJob, limit_ns: int) -> int | None:
    return max(0, limit_ns - job.ran_ns) + leave_ns(view, job) if limit_ns else None


def leave_ns(view: View, job: ClusterJob) -> int:
    """How long a job may take to leave at its limit: the grace, or what a checkpoint takes."""
    policy, expected = view.policy, job.spec.expected
    drain_ns = derive(policy.timeouts, expected).drain_ns if expected.checkpoint_steps else 0
    return max(policy.queue.grace_ns, drain_ns)


def end_ns(view: View, job: ClusterJob) -> int:
    """When a running job will be gone: at the latest, where it has a limit."""
    return min(NEVER_NS, job.started_ns + length_ns(view, job))


def length_ns(view: View, job: ClusterJob) -> int:
    """How long a job holds its nodes once it starts: its bound, or what is expected of it."""
    expected = job.spec.expected
    bound = bound_ns(view, job)
    if bound is not None:
        return bound
    if not expected.steps:
        return view.policy.queue.unbounded_ns
    running = max(0, expected.steps * expected.step_ns - job.ran_ns)
    return running + expected.start_ns + expected.form_ns


def likely_end_ns(view: View, job: ClusterJob) -> int | None:
    """When a running job will probably be gone, as it looks now; None: nobody can say.

    Unlike what the queue reckons with, it moves as steps are made, and nothing is assumed.
    """
    expected, now, bound = job.spec.expected, view.now_ns, bound_ns(view, job)
    ends = [] if bound is None else [job.started_ns + bound]
    if expected.steps and (not ends or not job.spec.requeue_at_limit):
        left = max(1, expected.steps - job.step)
        if job.step_ns:
            ends.append(now + left * job.step_ns)
        else:  # until one is measured, from its start on: a guess that is over is none
            ends.append(job.started_ns + left * expected.step_ns)
    known = [end for end in ends if end > now]
    return min(known, default=None)


class Horizon:
    """Ends by node, GPU by GPU, kept up to date with the fleet."""

    def __init__(self, view: View) -> None:
        self._ends: dict[int, int] = {}  # by job
        fleet = view.fleet
        free_index_of(fleet)
        self._most = max((known.gpus for known in fleet.classes), default=0)
        # Sorted in each row: column k - 1 is when k GPUs are free. 0: now.
        self._free_at = np.zeros((0, self._most), np.int64)
        self._empty_at = np.zeros(0, np.int64)  # when nobody holds anything of the node
        self._renew(view, range(len(fleet)))
        free_index_of(fleet).renewed.clear()

    def refresh(self, view: View) -> bool:
        """Takes over what changed; False: nodes of a new kind came, make a new one."""
        renewed = free_index_of(view.fleet).renewed
        if not renewed:
            return True
        if max((known.gpus for known in view.fleet.classes), default=0) != self._most:
            return False
        self._renew(view, renewed)
        renewed.clear()
        return True

    def started(self, view: View, job: ClusterJob) -> None:
        """A job starts now; the core has not written that down yet."""
        self._ends[job.id] = min(NEVER_NS, view.now_ns + length_ns(view, job))

    def forget(self, job: int) -> None:
        """A job stopped: its next start has another end."""
        self._ends.pop(job, None)

    def end_ns(self, view: View, job: int) -> int:
        """When a running job will be gone."""
        end = self._ends.get(job)
        if end is None:
            known = view.jobs.get(job)
            end = NEVER_NS if known is None else end_ns(view, known)
            self._ends[job] = end
        return end

    def free_at(self, view: View, request: PlacementRequest) -> tuple[Column, Column]:
        """(nodes that would do, when each has room for a slot), 0 meaning now."""
        free_index, fleet, shape = free_index_of(view.fleet), view.fleet, request.shape
        classes = free_index.suiting(shape, request.constraint, request.partition, request.barred)
        able: Nodes = 0
        for number in classes:
            able |= free_index.members[number]
        nodes = array_of(able & free_index.healthy & ~request.closed, len(fleet))
        if shape.whole_nodes:
            return nodes, self._empty_at[nodes]
        times = np.zeros(len(nodes), np.int64)
        if shape.slot_gpus:
            times = self._free_at[nodes, shape.slot_gpus - 1]
        columns = fleet.columns
        tight = columns.free_cpus[nodes] < shape.slot_cpus
        tight |= columns.free_memory[nodes] < shape.slot_memory_bytes
        # Who holds the CPUs is not looked into: when all have left, they are free.
        return nodes, np.where(tight, self._empty_at[nodes], times)

    def _renew(self, view: View, nodes: Collection[int]) -> None:
        fleet = view.fleet
        if len(fleet) > len(self._empty_at):
            more = max(len(fleet), 2 * len(self._empty_at)) - len(self._empty_at)
            rows = np.zeros((more, self._most), np.int64)
            self._free_at = np.concatenate((self._free_at, rows))
            self._empty_at = np.concatenate((self._empty_at, np.zeros(more, np.int64)))
        free_at: list[list[int]] = []
        empty_at: list[int] = []
        for node in nodes:
            count = fleet.nodes[node].gpus
            times: list[int] = []
            last = 0
            for job, claim in fleet.held[node].items():
                end = self.end_ns(view, job)
                last = max(last, end)
                times += [end] * claim.gpus.bit_count()
            times.sort()
            empty_at.append(last)
            free = count - len(times)
            free_at.append([0] * free + times + [NEVER_NS] * (self._most - count))
        changed = np.fromiter(nodes, np.int64, len(nodes))
        self._free_at[changed] = np.asarray(free_at, np.int64).reshape(len(nodes), self._most)
        self._empty_at[changed] = empty_at


class RunningEnds:
    """The horizon, made at the first question and anew when nodes of another kind join."""

    def __init__(self) -> None:
        self._horizon: Horizon | None = None

    def copy(self) -> RunningEnds:
        """One that may be asked without changing when this one makes its horizon."""
        twin = RunningEnds()
        twin._horizon = self._horizon
        return twin

    def horizon(self, view: View) -> Horizon:
        """Ends of all that runs."""
        if self._horizon is None or not self._horizon.refresh(view):
            self._horizon = Horizon(view)
        return self._horizon

    def gone_ns(self, view: View, job: int) -> int | None:
        """When a running job will be gone; None: it should be by now, and nobody knows."""
        end_ns = self.horizon(view).end_ns(view, job)
        return end_ns if end_ns > view.now_ns else None

    def started(self, view: View, job: ClusterJob) -> None:
        """A job starts now; its nodes are looked at when somebody asks for ends."""
        horizon = self.horizon(view) if self._horizon is None else self._horizon
        horizon.started(view, job)

    def forget(self, job: int) -> None:
        """A job stopped: its next start has another end."""
        if self._horizon is not None:
            self._horizon.forget(job)


def earliest(
    fleet: Fleet, request: PlacementRequest, nodes: Column, times: Column, now_ns: int, soon_ns: int
) -> tuple[int, Column] | None:
    """(when, on which nodes) a gang has room at the earliest; None: never.

    Of the nodes that are free by then, those that become free last are chosen: the others stay
    useful to short jobs until then. What should have ended already will not before ``soon_ns``.
    """
    wide, wanted = tensor_slots(request.shape), request.shape.slots(request.replicas)
    times = np.where(times > 0, np.maximum(times, soon_ns), now_ns)
    if len(nodes) < wanted:
        return None
    if wide == 1:
        at = int(np.partition(times, wanted - 1)[wanted - 1])
        if at >= NEVER_NS:
            return None
        able = np.flatnonzero(times <= at)
        last = able[np.lexsort((nodes[able], -times[able]))[:wanted]]
        return at, np.sort(nodes[last])
    moments = np.unique(times[times < NEVER_NS])
    domain = fleet.columns.domain[nodes]

    def groups(at: int) -> Column:
        return np.bincount(domain[times <= at]) // wide

    low, high = 0, len(moments)
    while low < high:
        middle = (low + high) // 2
        at = int(moments[middle])
        fits = int(groups(at).sum()) * wide >= wanted
        low, high = (low, middle) if fits else (middle + 1, high)
    if low == len(moments):
        return None
    at = int(moments[low])
    whole = groups(at)
    able = np.flatnonzero(times <= at)
    able = able[np.lexsort((nodes[able], domain[able]))]
    starts = np.flatnonzero(np.diff(domain[able], prepend=-1))
    counts = np.diff(np.append(starts, len(able)))
    nth = np.arange(len(able)) - np.repeat(starts, counts)
    grouped = nth < whole[domain[able]] * wide
    return at, np.sort(nodes[able[grouped][:wanted]])
