"""The promised starts of blocked jobs, and the nodes kept for them."""

from __future__ import annotations

from phalanx.cluster.placement.free_index import Nodes, free_index_of, set_of_nodes
from phalanx.cluster.queue.decisions import QueueState, Reserved
from phalanx.cluster.state import View


class Promises:
    """Promises by job, with their nodes as sets."""

    def __init__(self, state: QueueState) -> None:
        self.by_job = state.reserved
        self._nodes: dict[int, Nodes] = {}

    def nodes(self, job: int) -> Nodes:
        """The nodes promised to a job."""
        if job not in self._nodes:
            self._nodes[job] = set_of_nodes(self.by_job[job].nodes)
        return self._nodes[job]

    def make(self, promise: Reserved) -> None:
        """Remembers a promised start."""
        self.by_job[promise.job] = promise
        self._nodes.pop(promise.job, None)

    def drop(self, job: int) -> None:
        """Forgets a promised start."""
        self.by_job.pop(job, None)
        self._nodes.pop(job, None)

    def hold(self, view: View, promise: Reserved) -> bool:
        """Whether a promise needs no new look yet."""
        policy, now = view.policy.queue, view.now_ns
        if promise.waits:
            return now < promise.start_ns
        if self.nodes(promise.job) & ~free_index_of(view.fleet).healthy:
            return False
        if promise.asked:
            # Also where nobody has grace: those who left may not take their nodes back at once.
            return now < promise.start_ns + max(policy.grace_ns, policy.replan_ns)
        # A start that is far away need not be known to the second.
        ahead_ns = promise.start_ns - promise.made_ns
        until_ns = promise.made_ns + max(policy.replan_ns, ahead_ns // 64)
        return now < promise.start_ns and now < until_ns

    def first_start_ns(self, nodes: tuple[int, ...]) -> int | None:
        """When the first of those starts who were promised some of these nodes."""
        mine = set_of_nodes(nodes)
        starts = [one.start_ns for number, one in self.by_job.items() if mine & self.nodes(number)]
        return min(starts, default=None)
