"""A site without a core: the queue, a fleet, and jobs that run as long as they should."""

from __future__ import annotations

from heapq import heappop, heappush

import msgspec
from msgspec import structs

from phalanx.cluster.fleet.fleet import Fleet, FleetState
from phalanx.cluster.jobs.job import ClusterJob, GangShape, JobSpec
from phalanx.cluster.policy import Policy, QueuePolicy
from phalanx.cluster.queue.decisions import Decision, Preempt, QueueState, Resize, Start
from phalanx.cluster.queue.preemption import shrinks
from phalanx.cluster.queue.queue import Queue
from phalanx.cluster.state import Reservation, View
from tests.cluster.fleets import fleet_of

MINUTE = 60 * 10**9
HOUR = 60 * MINUTE


def policy_of(**queue: object) -> Policy:
    """A policy without delays that would blur times, unless a test asks for them."""
    plain = {"grace_ns": 0, "least_run_ns": 0, "replan_ns": 0, "delay_ns": 0, **queue}
    return Policy(queue=QueuePolicy(**plain))  # type: ignore[arg-type]


class Site:
    """Plays the world around a queue: time, ends of jobs, and what its decisions mean."""

    def __init__(self, fleet: Fleet | None = None, policy: Policy | None = None) -> None:
        self.view = View(fleet or fleet_of(8), policy or policy_of())
        self.queue = Queue(QueueState())
        self.ends: list[tuple[int, int, int]] = []  # (time, job, start it belongs to)
        self.runs: dict[int, int] = {}  # by job: how long it really runs
        self.started: dict[int, int] = {}  # first start of each job
        self.decisions: list[tuple[int, Decision]] = []
        self.arrivals: list[tuple[int, int, JobSpec, int]] = []

    def submit(self, gpus: int = 8, run: int = HOUR, **spec: object) -> int:
        """A job on whole or part nodes of eight GPUs that runs this long."""
        number = len(self.view.jobs) + 1
        gang = spec.pop("gang", None) or shape_of(gpus)
        full = JobSpec(name=f"j{number}", gang=gang, **spec)  # type: ignore[arg-type]
        now = self.view.now_ns
        job = ClusterJob(id=number, spec=full, submitted_ns=now, queued_ns=now)
        self.view.jobs[number] = job
        self.runs[number] = run
        self.view.pending[number] = None
        self.queue.on_pending(self.view, job)
        return number

    def look(self) -> list[Decision]:
        """One pass of the queue, and what follows from it."""
        found = self.queue.schedule(self.view)
        for decision in found:
            self.decisions.append((self.view.now_ns, decision))
            self.act(decision)
        return found

    def act(self, decision: Decision) -> None:
        """What the core would do."""
        view, job = self.view, self.view.jobs[decision.job]
        match decision:
            case Start():
                del view.pending[job.id]
                view.active[job.id] = None
                job.placement, job.state = decision.placement, "running"
                job.started_ns = view.now_ns
                job.waited_ns += view.now_ns - job.queued_ns
                self.started.setdefault(job.id, view.now_ns)
                end = view.now_ns + max(1, self.runs[job.id] - job.ran_ns)
                heappush(self.ends, (end, job.id, view.now_ns))
            case Preempt():
                job.state = "draining"
                job.preemptions += 1
                leave = view.now_ns + decision.grace_ns
                heappush(self.ends, (leave, job.id, -1))
            case Resize():
                assert job.placement is not None
                freed = dict(shrinks(job, decision.replicas))[decision.replicas]
                for node in freed:
                    view.fleet.release(job.id, node)
                kept = tuple(node for node in job.placement.nodes if node not in freed)
                job.placement = structs.replace(
                    job.placement, nodes=kept, replicas=decision.replicas
                )

    def end(self, number: int, *, again: bool = False) -> None:
        """A job gives everything back; ``again``: it goes to the queue."""
        view, job = self.view, self.view.jobs[number]
        assert job.placement is not None
        for node in job.placement.nodes:
            view.fleet.release(number, node)
        job.placement = None
        del view.active[number]
        job.ran_ns += view.now_ns - job.started_ns
        self.queue.on_stopped(view, job)
        job.state = "pending" if again else "done"
        if again:
            job.queued_ns = view.now_ns
            view.pending[number] = None
            self.queue.on_pending(view, job)

    def play(self, until: int) -> None:
        """Lets time pass to a moment; the queue is looked at whenever something ends."""
        self.look()
        while True:
            wake = self.queue.next_wake_ns(self.view)
            times = [self.ends[0][0]] if self.ends else []
            times += [wake] if wake is not None else []
            if not times or min(times) > until:
                break
            self.view.now_ns = max(self.view.now_ns, min(times))
            while self.ends and self.ends[0][0] <= self.view.now_ns:
                _, number, start = heappop(self.ends)
                job = self.view.jobs[number]
                if job.placement is None or start not in (-1, job.started_ns):
                    continue
                self.end(number, again=start == -1)
            self.look()
        self.view.now_ns = max(self.view.now_ns, until)

    def reserve(self, name: str, start: int, end: int, nodes: tuple[int, ...], *teams: str) -> None:
        """An advance reservation, or a maintenance window without teams."""
        self.view.reservations[name] = Reservation(
            name=name, start_ns=start, end_ns=end, nodes=nodes, teams=teams
        )

    def held(self, team: str) -> int:
        """GPUs that a team holds."""
        return sum(
            self.view.fleet.job_gpus.get(number, 0)
            for number in self.view.active
            if self.view.jobs[number].spec.team == team
        )

    def copy(self) -> Site:
        """The same site after a snapshot: every cache of the queue is gone."""
        other = Site.__new__(Site)
        other.__dict__.update(self.__dict__)
        view = self.view
        kept = msgspec.json.encode(view.fleet.dump())
        fleet = Fleet.load(msgspec.json.decode(kept, type=FleetState))
        other.view = View(fleet, view.policy, view.now_ns)
        other.view.jobs = {
            number: msgspec.convert(msgspec.to_builtins(job), ClusterJob)
            for number, job in view.jobs.items()
        }
        other.view.pending, other.view.active = dict(view.pending), dict(view.active)
        other.view.quotas, other.view.reservations = dict(view.quotas), dict(view.reservations)
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(self.queue.state), type=QueueState)
        other.queue = Queue(state)
        other.ends, other.runs = list(self.ends), dict(self.runs)
        other.started, other.decisions = dict(self.started), list(self.decisions)
        return other


def shape_of(gpus: int) -> GangShape:
    """Whole nodes of eight GPUs, or part of one."""
    if gpus % 8 == 0:
        return GangShape(replicas=gpus // 8, tensor=8, slot_gpus=8)
    return GangShape(replicas=gpus, slot_gpus=gpus)
