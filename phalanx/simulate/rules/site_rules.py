"""What a site was promised: arrays, dependencies, classes of service, windows, limits, budgets.

Told apart from what the core believes: widths and dependencies are read from submissions, windows
from reservations, times from when a job was seen to get its nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain

from phalanx.cluster.core import Core
from phalanx.cluster.jobs.job import ENDED, ClusterJob, JobSpec, JobState
from phalanx.cluster.jobs.leave_cause import LeaveCause
from phalanx.cluster.node import NodeState
from phalanx.cluster.policy import Partition
from phalanx.cluster.protocol.events import (
    DrainNode,
    Event,
    NodeRepaired,
    NodeSilent,
    ReadmitNode,
    SetReservation,
)
from phalanx.cluster.protocol.messages import NodeNotice
from phalanx.cluster.protocol.timeouts import derive
from phalanx.cluster.state import Reservation, View
from phalanx.cluster.units import SECOND_NS

Complain = Callable[[str, str], None]
MINUTE_NS = 60 * SECOND_NS


def members(jobs: Mapping[int, ClusterJob], number: int) -> list[int]:
    """A job, or all jobs of the array that it is the first of."""
    first = jobs.get(number)
    if first is None or first.spec.array is None or first.array_parent != number:
        return [number]
    return [other for other in range(number, number + first.spec.array.count) if other in jobs]


def gpus_with_spares(view: View, job: ClusterJob) -> int:
    """GPUs of a job's gang and of the nodes that stand by for it."""
    if job.placement is None:
        return 0
    spares = sum(view.fleet.nodes[node].gpus for node in job.placement.spares)
    return job.spec.gang.gpus(job.placement.replicas) + spares


def held_by(view: View, whose: Callable[[JobSpec], str]) -> dict[str, int]:
    """GPUs of the jobs that have nodes, by what ``whose`` says of each."""
    gpus_of: dict[str, int] = {}
    for number in view.active:
        job = view.jobs[number]
        owner = whose(job.spec)
        gpus_of[owner] = gpus_of.get(owner, 0) + gpus_with_spares(view, job)
    return gpus_of


def _let_in(rule: Partition, spec: JobSpec) -> bool:
    short = not rule.most_time_ns or 0 < spec.time_limit_ns <= rule.most_time_ns
    return short and (not rule.teams or spec.team in rule.teams)


class SiteRules:
    """Looks at jobs when they start, and at all of them now and then."""

    def __init__(self, core: Core, complain: Complain) -> None:
        self.core = core
        self._complain = complain
        self._seen_ns: dict[str, tuple[Reservation, int]] = {}  # windows, since when they are known
        self._empty_by_ns: dict[int, int] = {}  # nodes that were to be empty by a time
        self._new = ""  # the window of this event: what was due before it may have come first

    def heard(self, event: Event) -> None:
        """The core was told something: when a node must be empty counts, the soonest."""
        body = event.body
        self._new = body.name if isinstance(body, SetReservation) else ""
        if isinstance(body, ReadmitNode | NodeRepaired | NodeSilent):
            self._empty_by_ns.pop(body.node, None)
        if isinstance(body, DrainNode | NodeNotice) and body.deadline_ns:
            known_ns = self._empty_by_ns.get(body.node, body.deadline_ns)
            self._empty_by_ns[body.node] = min(known_ns, body.deadline_ns)

    def placed(self, job: ClusterJob) -> None:
        """A job has other nodes than before: all must be in partitions that let it in."""
        fleet, policy, placement = self.core.view.fleet, self.core.view.policy.queue, job.placement
        assert placement is not None
        if not policy.partitions and not job.spec.partition:
            return
        for node in placement.nodes + placement.spares:
            name = fleet.nodes[node].partition
            rule = policy.partitions.get(name)
            if job.spec.partition not in ("", name) or (rule and not _let_in(rule, job.spec)):
                self._complain("partition", f'job {job.id} has node {node} of "{name}"')

    def told_to_leave(self, job: ClusterJob) -> None:
        """A gang was told to save its state and go: for others only who may be sent away."""
        view, cause = self.core.view, LeaveCause.of(job.why)
        if cause not in (LeaveCause.PREEMPTED, LeaveCause.RECLAIMED, LeaveCause.TURN):
            return
        ran_ns = view.now_ns - job.started_ns
        if ran_ns < view.policy.queue.least_run_ns:
            self._complain("sent_away", f"job {job.id} leaves after {ran_ns // SECOND_NS} s")
        quota = view.quotas.get(job.spec.team)
        borrows = held_by(view, lambda spec: spec.team)[job.spec.team] > (
            quota.gpus if quota else 0
        )
        owns = not view.quotas or not borrows
        if owns and not (cause is LeaveCause.PREEMPTED and job.spec.preemptible):
            self._complain("sent_away", f"job {job.id} is neither on loan nor preemptible")

    def started(self, job: ClusterJob) -> None:
        """A job got its nodes."""
        if job.held or job.spec.begin_ns > self.core.view.now_ns:
            self._complain("kept_out", f"job {job.id} is held, or was to begin later")
        self._after_others(job)
        self._array(job)
        now, placement = self.core.view.now_ns, job.placement
        assert placement is not None
        for window in self.core.view.reservations.values():
            open_now = window.start_ns <= now < window.end_ns
            if open_now and job.spec.team not in window.teams and window.name != self._new:
                taken = set(placement.nodes).intersection(self._nodes(window))
                if taken:
                    told = f"job {job.id} starts on nodes {sorted(taken)} of {window.name}"
                    self._complain("window", told)

    def sweep(self) -> None:
        """Looks at everything that runs."""
        self._classes()
        self._windows()
        self._emptied()
        for number in self.core.view.active:
            self._limits(self.core.view.jobs[number])

    def _after_others(self, job: ClusterJob) -> None:
        jobs = self.core.view.jobs
        for dependency in job.spec.after:
            if dependency.kind == "singleton":
                same = [
                    other
                    for other in self.core.view.active
                    if other < job.id
                    and jobs[other].spec.name == job.spec.name
                    and jobs[other].spec.user == job.spec.user
                ]
                if same:
                    self._complain("dependency", f"job {job.id} runs beside {same}")
                continue
            for number in members(jobs, dependency.job):
                other = jobs.get(number)
                enough = (JobState.DONE,) if dependency.kind == "afterok" else ENDED
                if other is not None and other.state not in enough:
                    told = f"job {job.id} starts, {dependency.kind} {number} notwithstanding"
                    self._complain("dependency", told)

    def _array(self, job: ClusterJob) -> None:
        array, view = job.spec.array, self.core.view
        if array is None or not array.width:
            return
        running = [n for n in view.active if view.jobs[n].array_parent == job.array_parent]
        if len(running) > array.width:
            told = f"{len(running)} members of array {job.array_parent} run, {array.width} may"
            self._complain("array", told)

    def _classes(self) -> None:
        view = self.core.view
        for name, gpus in held_by(view, lambda spec: spec.qos).items():
            rule = view.policy.queue.qos.get(name)
            if rule is not None and rule.most_gpus and gpus > rule.most_gpus:
                self._complain("quota", f"class {name} holds {gpus} of {rule.most_gpus} GPUs")
        for number in view.active:
            job = view.jobs[number]
            rule, gpus = view.policy.queue.qos.get(job.spec.qos), gpus_with_spares(view, job)
            if rule is not None and rule.most_gpus_per_job and gpus > rule.most_gpus_per_job:
                told = f"job {number} of class {job.spec.qos} holds {gpus} GPUs"
                self._complain("quota", f"{told} of {rule.most_gpus_per_job}")

    def _nodes(self, window: Reservation) -> tuple[int, ...]:
        return window.nodes or self.core.queue.state.windows.get(window.name, ())

    def _windows(self) -> None:
        """Reserved nodes are left to those they are for, once everybody had the time to leave."""
        view = self.core.view
        open_windows = {}
        for window in view.reservations.values():
            before = self._seen_ns.get(window.name)
            same = before is not None and before[0] == window
            open_windows[window.name] = before if before and same else (window, view.now_ns)
        self._seen_ns = open_windows
        for window, seen_ns in open_windows.values():
            closed_ns = max(window.start_ns, seen_ns) + view.policy.queue.grace_ns + 3 * MINUTE_NS
            if not closed_ns <= view.now_ns < window.end_ns:
                continue
            holders = dict.fromkeys(
                chain.from_iterable(view.fleet.held[n] for n in self._nodes(window))
            )
            for number in holders:
                if view.jobs[number].spec.team not in window.teams:
                    self._complain("window", f"job {number} is still on nodes of {window.name}")

    def _emptied(self) -> None:
        """Nodes that were to be empty by a time are, unless somebody took that back."""
        fleet = self.core.view.fleet
        for node, by_ns in list(self._empty_by_ns.items()):
            if fleet.state(node) is not NodeState.DRAINING:
                del self._empty_by_ns[node]
            elif fleet.held[node] and self.core.view.now_ns > by_ns + 3 * MINUTE_NS:
                told = f"jobs {list(fleet.held[node])} are still on node {node}"
                self._complain("emptied", told)

    def _limits(self, job: ClusterJob) -> None:
        """Nobody goes on for longer than it takes to leave."""
        view, spec = self.core.view, job.spec
        times = derive(view.policy.timeouts, spec.expected, job.step_ns)
        leave_ns = (
            2 * (times.join_ns + times.restore_ns)
            + 4 * max(times.drain_ns, times.hang_ns)
            + 3 * MINUTE_NS
        )
        if spec.time_limit_ns:
            ran = view.now_ns - job.started_ns + job.ran_ns
            if ran > spec.time_limit_ns + leave_ns:
                sentence = f"job {job.id} has run {ran // SECOND_NS} s"
                self._complain("limit", f"{sentence} of {spec.time_limit_ns // SECOND_NS}")
        if job.budget_gpu_seconds and not job.forced:
            account = self.core.ledger.accounts[job.id]
            used = self.core.ledger.used_gpu_ns(job.id)
            most = job.budget_gpu_seconds * SECOND_NS
            if used > most + leave_ns * (account.gpus + account.spare_gpus):
                sentence = f"job {job.id} has used {used // SECOND_NS} GPU-seconds"
                self._complain("limit", f"{sentence} of {job.budget_gpu_seconds}")
