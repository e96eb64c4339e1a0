"""The queue's state with everything that is computed from it and the view.

Indices are built when they are first asked for and follow what changes in the fleet; only
``QueueState`` is part of a snapshot.
"""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.jobs.horizon import RunningEnds
from phalanx.cluster.jobs.job import ClusterJob, Placement
from phalanx.cluster.node import NodeState
from phalanx.cluster.placement.request import held_by
from phalanx.cluster.queue.decisions import QueueState
from phalanx.cluster.queue.holdings import Holdings
from phalanx.cluster.queue.limits import Limits
from phalanx.cluster.queue.pending import PendingJobs, Priorities
from phalanx.cluster.queue.promises import Promises
from phalanx.cluster.queue.window_nodes import WindowNodes
from phalanx.cluster.reasons import reason
from phalanx.cluster.state import View


class QueueIndex:
    """Who waits, who holds what, what is promised or reserved, and when what runs will end."""

    def __init__(self, state: QueueState) -> None:
        self.state = state
        self.waiting = PendingJobs()
        self.holdings = Holdings(state)
        self.limits = Limits(self.holdings, self.waiting)
        self.promises = Promises(state)
        self.windows = WindowNodes(state)
        self.ends = RunningEnds()

    def copy_to_ask(self, view: View) -> QueueIndex:
        """An up-to-date copy that may be asked anything: nothing that is logged changes."""
        old = self.state
        twin = QueueIndex.__new__(QueueIndex)
        twin.state = structs.replace(
            old, usage=dict(old.usage), held=dict(old.held), windows=dict(old.windows)
        )
        twin.waiting, twin.promises = self.waiting, self.promises
        twin.holdings = self.holdings.copy_for(twin.state)
        twin.limits = Limits(twin.holdings, twin.waiting)
        twin.windows = self.windows.copy_for(twin.state)
        twin.ends = self.ends.copy()
        twin._catch_up(view)
        return twin

    def sync(self, view: View) -> None:
        """Takes over what changed outside: who holds what, who is pending, windows."""
        self._catch_up(view)
        view.fleet.changed_jobs.clear()

    def _catch_up(self, view: View) -> None:
        self.holdings.accrue(view)
        self.waiting.refresh(view)
        if self.holdings.built:
            self.holdings.follow(view)
            return
        self.holdings.build(view)
        for number in view.pending:
            if number not in self.waiting.where:
                self.waiting.add(view, view.jobs[number])

    def ranks(self, view: View) -> Priorities:
        """Priorities at this moment."""
        return Priorities(view, self.state.usage, self.state.held)

    def forget(self, job: int) -> None:
        """A job waits no longer."""
        self.waiting.remove(job)
        self.promises.drop(job)
        self.state.tried_ns.pop(job, None)

    def start(self, view: View, job: ClusterJob, placement: Placement) -> None:
        """Takes the nodes of a job that starts."""
        self.ends.started(view, job)
        self.forget(job.id)
        take(view, job, placement)
        self.sync(view)
        self.holdings.add_spares(view, job, placement)


def take(view: View, job: ClusterJob, placement: Placement) -> None:
    """Gives a job the nodes of its placement."""
    fleet, shape = view.fleet, job.spec.gang
    masks = placement.gpus or tuple((1 << shape.slot_gpus) - 1 for _ in placement.nodes)
    for node, mask in zip(placement.nodes, masks, strict=True):
        fleet.take(job.id, node, held_by(fleet, shape, node, mask))
    for node in placement.spares:
        why = reason("spare_of_job", job=job.id)
        fleet.set_state(node, NodeState.SPARE, view.now_ns, why, spare_for=job.id)
