"""The promised starts of blocked jobs, and the nodes kept for them.

Short jobs go first, and long ones wait for them. A site may bound that (``firm_after_ns``) by about
the wait in order of arrival, which is as long as all that waits would fill the fleet: then a job
has a firm promise, as the head of EASY's queue has one. What people decided comes first: a job to
which they gave a higher priority still goes before, and where teams own GPUs, ownership orders.
Only who has waited ``starving_ns`` yields to nobody.
"""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.fabric.before_gangs import waits_until_ns
from phalanx.cluster.jobs.job import ClusterJob, Placement
from phalanx.cluster.placement.free_index import Nodes, free_index_of, set_of_nodes
from phalanx.cluster.queue.decisions import CheckFirst, QueueState, Reserved
from phalanx.cluster.queue.pending import Entry, PendingJobs, starves, waited_ns
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


class GangChecks:
    """In one look at the queue: gangs whose nodes are measured first, and are kept meanwhile."""

    def __init__(self, view: View, promises: Promises) -> None:
        self._view, self._promises = view, promises
        running = view.fabric_checks.running
        self.waiting: dict[int, None] = {running.for_job: None} if running else {}  # gangs

    def wanted(self, job: ClusterJob, placement: Placement) -> CheckFirst | None:
        """The check that a gang waits for instead of starting; its nodes are promised to it."""
        until_ns = waits_until_ns(self._view, job, placement)
        if not until_ns:
            return None
        promise = Reserved(
            job=job.id,
            start_ns=until_ns,
            nodes=placement.nodes + placement.spares,
            made_ns=self._view.now_ns,
            firm=True,
            waits=True,
        )
        self._promises.make(promise)
        self.waiting[job.id] = None
        return CheckFirst(job.id, placement.nodes, until_ns)


def firm_after_ns(view: View, waiting: PendingJobs) -> int:
    """How long a job may be overtaken by others of its priority."""
    policy = view.policy.queue
    if view.quotas:
        return policy.starving_ns
    work_ns = waiting.gpu_ns // max(1, view.fleet.total_gpus)
    return min(policy.starving_ns, max(policy.firm_after_ns, work_ns))


def overtaken(view: View, waiting: PendingJobs) -> list[Entry]:
    """Of each lane the first job, where others were before it for too long; the oldest first."""
    after_ns, highest = firm_after_ns(view, waiting), _highest(waiting)
    firsts = []
    for lane in waiting.lanes.values():
        job = view.jobs[lane.entries[0][1]]
        due = lane.given == highest and waited_ns(view, job) >= after_ns
        if due or starves(view, job):
            firsts.append(lane.entries[0])
    return sorted(firsts)


def yield_to_higher(view: View, waiting: PendingJobs, promises: Promises) -> None:
    """Promises of those who do not starve are firm among jobs of their own priority alone."""
    highest: int | None = None
    for number, promise in list(promises.by_job.items()):
        if not promise.firm or unmoved(view, promise) or number not in waiting.where:
            continue
        highest = _highest(waiting) if highest is None else highest
        if waiting.where[number][0].given < highest:
            promises.make(structs.replace(promise, firm=False))


def unmoved(view: View, promise: Reserved) -> bool:
    """Whether no priority moves a promise: others left or wait for it, or its job starves."""
    kept = bool(promise.asked) or promise.waits
    return promise.firm and (kept or starves(view, view.jobs[promise.job]))


def _highest(waiting: PendingJobs) -> int:
    """The highest priority that people gave any job that waits."""
    return max((lane.given for lane in waiting.lanes.values()), default=0)
