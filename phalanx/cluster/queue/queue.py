"""Which job runs next.

The core calls ``schedule`` when something changed; the functions named ``on_…`` tell the queue what
happened to a job meanwhile. Everything the queue remembers is in ``QueueState``, which is part of a
snapshot; what can be computed from it and the view is in ``QueueIndex``.

A pass has two parts. First jobs start in order of priority, until one has no room: it is promised a
start and nodes (``reserve``), after asking others to leave where it may. Then jobs behind it start
where they cannot be in its way.
"""

from __future__ import annotations

import numpy as np
from msgspec import structs

from phalanx.cluster.jobs.horizon import NEVER_NS, leave_ns
from phalanx.cluster.jobs.job import ClusterJob, Placement
from phalanx.cluster.placement.free_index import Nodes
from phalanx.cluster.placement.request import request_of
from phalanx.cluster.queue import wakes
from phalanx.cluster.queue.claims import collected, collector
from phalanx.cluster.queue.cycle import Pass
from phalanx.cluster.queue.decisions import Decision, QueueState, Reserved
from phalanx.cluster.queue.index import QueueIndex
from phalanx.cluster.queue.pending import (
    Lane,
    PriorityOrder,
    base_parts,
    given_priority,
)
from phalanx.cluster.queue.promises import unmoved
from phalanx.cluster.state import View


class Queue:
    """The order of jobs, and who starts, stops or shrinks."""

    def __init__(self, state: QueueState) -> None:
        self.state = state
        self._index = QueueIndex(state)
        self.waiting = self._index.waiting
        self.limits = self._index.limits
        self.promises = self._index.promises
        self.windows = self._index.windows
        self.unfinished = False  # the last pass stopped before it had come to all jobs

    def sync(self, view: View) -> None:
        """Takes over what changed outside: who holds what, who is pending, windows."""
        self._index.sync(view)

    def prepare(self, view: View) -> None:
        """Makes what the next decision would have to wait for: the ends of all that runs."""
        self._index.ends.horizon(view)

    def on_pending(self, view: View, *jobs: ClusterJob) -> None:
        """A job became eligible, or came back after a preemption or failure.

        Several at once are jobs of one array: they differ in their numbers alone.
        """
        self.sync(view)
        self.waiting.add(view, *jobs)

    def on_stopped(self, view: View, job: ClusterJob) -> None:
        """A job gave its nodes back."""
        self._index.ends.forget(job.id)
        self.sync(view)

    def on_remapped(self, view: View, job: ClusterJob) -> None:
        """A job goes on with another mapping on some of its nodes, and with another end."""
        self._index.ends.forget(job.id)
        self.sync(view)

    def on_withdrawn(self, view: View, job: ClusterJob) -> None:
        """A pending job was cancelled or held."""
        self.sync(view)
        self._index.forget(job.id)

    def start_at_once(self, view: View, job: ClusterJob, placement: Placement) -> None:
        """A pending job has a place before the others are looked at. Takes its nodes."""
        self.sync(view)
        self._index.start(view, job, placement)

    def schedule(self, view: View) -> list[Decision]:
        """What to start, stop or resize now. Takes the nodes of what it starts."""
        self.sync(view)
        self.unfinished = False
        if not (self.waiting.where or self.promises.by_job or view.reservations):
            return []
        one = Pass(self._index, view)
        decisions = one.run()
        self.unfinished = one.unfinished
        return decisions

    def next_wake_ns(self, view: View) -> int | None:
        """When to look again although nothing happened (a window opens, a promise falls due)."""
        return wakes.next_wake_ns(self._index, view)

    def copy_to_ask(self, view: View) -> QueueIndex:
        """What may be asked about the future without changing anything that is logged."""
        return self._index.copy_to_ask(view)

    def priority(self, view: View, job: ClusterJob, since_ns: int) -> int:
        """The priority of a job if it had waited since then."""
        self.sync(view)
        spec = job.spec
        base = sum(base_parts(view.policy.queue, job).values())
        return self._index.ranks(view).of(Lane(spec.team, spec.qos, base), since_ns, 0)

    def first_priority(self, view: View) -> int | None:
        """The priority of the job that is first in line; None: nobody waits."""
        self.sync(view)
        front = PriorityOrder(self.waiting, self._index.ranks(view))
        for lane in self.waiting.lanes.values():
            front.add(lane, lane.entries)
        return front.first_priority()

    def wait_for_rest(
        self, view: View, job: ClusterJob, nodes: tuple[int, ...], until_ns: int
    ) -> None:
        """Keeps nodes for a pending job that lacks some others, for a time."""
        promise = Reserved(
            job=job.id, start_ns=until_ns, nodes=nodes, made_ns=view.now_ns, firm=True, waits=True
        )
        self.promises.make(promise)

    def free_ns(self, view: View, job: ClusterJob, count: int) -> int | None:
        """When so many more slots of a job will be free, by the ends of what runs; None: never."""
        closed = self.kept_from(view, job)
        request = structs.replace(request_of(job, 0, view.policy), closed=closed)
        nodes, times = self._index.ends.horizon(view).free_at(view, request)
        others = [job.id not in view.fleet.held[node] for node in nodes.tolist()]
        times = times[np.asarray(others, np.bool_)]
        if len(times) < count:
            return None
        at_ns = int(np.partition(times, count - 1)[count - 1])
        return at_ns if at_ns < NEVER_NS else None

    def closed_to(self, view: View, job: ClusterJob | None) -> Nodes:
        """Nodes promised to others than a job (None: to anybody): not for it to grow on.

        Nor are those that are being collected for somebody who has waited far too long.
        """
        self.sync(view)
        late = collector(self._index, view, self.limits.saved_for(view))
        closed = collected(self.waiting, view, late) if late else 0
        closed |= self.windows.closed_to(view, job.spec.team if job else "", None)
        for other in self.promises.by_job:
            if job is None or other != job.id:
                closed |= self.promises.nodes(other)
        return closed

    def kept_from(self, view: View, job: ClusterJob) -> Nodes:
        """Nodes that a running job may not take to replace others: promised, or in a window.

        A promise that is not firm yields to a job that would come before the promised one.
        """
        self.sync(view)
        end_ns = self._index.ends.gone_ns(view, job.id)
        closed = self.windows.closed_to(view, job.spec.team, end_ns)
        ranks = self._index.ranks(view)
        mine = self.priority(view, job, job.queued_ns)
        given = given_priority(base_parts(view.policy.queue, job))
        for other, promise in self.promises.by_job.items():
            in_time = end_ns is not None and end_ns <= promise.empty_ns
            if in_time or other not in self.waiting.where:
                continue
            lane, demand, queued_ns = self.waiting.where[other]
            firm = promise.firm and given <= lane.given
            if firm or unmoved(view, promise) or mine < ranks.of(lane, queued_ns, demand.gpus):
                closed |= self.promises.nodes(other)
        return closed

    def shut_now(self, view: View, job: ClusterJob) -> Nodes:
        """Nodes of windows that a running job would have to leave at once."""
        if not view.reservations:
            return 0
        end_ns = self._index.ends.gone_ns(view, job.id)
        soon_ns = view.now_ns + leave_ns(view, job)
        return self.windows.open_by(view, job.spec.team, end_ns, soon_ns)
