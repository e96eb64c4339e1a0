"""What the parts of the core share: the view, the ledger, timers, and the commands of an event."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.ledger.ledger import Ledger
from phalanx.cluster.node import Node
from phalanx.cluster.pipelines.machine import PipelineMachine
from phalanx.cluster.policy import Policy
from phalanx.cluster.protocol.commands import Command, CommandBody, Level, Notify
from phalanx.cluster.queue.queue import Queue
from phalanx.cluster.reasons import Reason
from phalanx.cluster.state import View

# (time, order of setting, kind, what it is about, token that must still hold)
Timer = tuple[int, int, str, int, int]


class Question(Struct, frozen=True, kw_only=True):
    """Something a person must decide."""

    number: int
    about: str  # "eviction"
    nodes: tuple[int, ...]
    causes: tuple[str, ...]
    asked_ns: int


class FailureDay(Struct, kw_only=True):
    """How long gangs ran on nodes of one kind, and what interrupted them: of one day."""

    day: int  # since the epoch
    gpu_seconds: int = 0
    causes: dict[str, int] = {}
    aged_gpu_seconds: dict[str, int] = {}  # by the nodes' age and past: see ``risk_groups``
    aged_failures: dict[str, int] = {}


class KindFailures(Struct, kw_only=True):
    """What was seen of one kind of node."""

    days: list[FailureDay] = []  # within the policy's window, newest last
    running_gpus: int = 0  # of gangs that run now
    running_gpu_ns: int = 0  # the sum over these GPUs of when they began to
    looked_at: dict[str, int] = {}  # rates by group when jobs were last looked at for a change


class NodeRates(Struct, kw_only=True):
    """How often nodes fail, as far as it was worked out at an event. Not in snapshots."""

    sequence: int
    now_ns: int
    by_kind: dict[str, dict[str, int]] = {}  # and group
    of_group: dict[tuple[str, str], int] = {}  # of a kind, those that were asked for
    seen: dict[str, Any] = {}  # SeenFailures of a kind
    totals: dict[tuple[int, ...], int] = {}  # over some nodes
    groups: NDArray[np.int64] | None = None  # of every node, see ``risk_groups``
    of_nodes: NDArray[np.int64] | None = None  # the rate of every node


class SeenReturns(Struct, kw_only=True):
    """Nodes that came back after one cause."""

    count: int = 0
    away_ns: int = 0  # all of them together


class HealthState(Struct, kw_only=True):
    """What the core remembers about nodes beyond their state."""

    incidents: dict[int, list[tuple[int, str]]] = {}  # by node: (time, cause), newest last
    testing: dict[int, int] = {}  # node: sequence of the command that asked for the test
    evictions: list[tuple[int, int]] = []  # (time, node), within the breaker's window
    withheld: dict[int, str] = {}  # nodes the breaker did not evict, with the cause
    alarms: dict[str, list[int]] = {}  # by detector: times of alarms that a test refuted
    incarnation: dict[int, int] = {}  # of each node's agent
    drain_deadline: dict[int, int] = {}  # node that must be empty: when; 0: at once
    drain_cause: dict[int, str] = {}  # why
    ordered: dict[int, int] = {}  # node that a person wants empty, until one gives it back: by when
    doomed: dict[int, str] = {}  # quarantined by a person as soon as they are empty
    failures: dict[str, KindFailures] = {}  # by kind of node
    in_service: dict[int, int] = {}  # young nodes: since when they are in the fleet, or repaired
    failed: dict[int, list[int]] = {}  # nodes that interrupted gangs: on which days
    down_ppm: int = 0  # chance of a node to be away, that spares are kept for; 0: by the prior
    failures_look_ns: int = 0  # when rates are looked at next although nothing failed; 0: never
    returns: dict[str, SeenReturns] = {}  # by the cause that took nodes
    renewed: dict[int, Node] = {}  # came back as other machines: described so when they are empty


class FlushState(Struct, kw_only=True):
    """Who writes to remote storage."""

    writing: dict[int, int] = {}  # job: until when
    waiting: dict[int, None] = {}
    bytes_per_second: int = -1  # as last reported; -1: as the policy says


class Context:
    """One core's mutable whole. Functions beside this one change it; nothing else does."""

    def __init__(self, view: View, queue: Queue, ledger: Ledger, epoch: int) -> None:
        self.view = view
        self.fleet = view.fleet
        self.queue = queue
        self.ledger = ledger
        self.epoch = epoch
        self.sequence = 0
        self.next_job = 1
        self.next_question = 1
        self.next_pipeline = 1
        self.health = HealthState()
        self.flush = FlushState()
        self.questions: dict[int, Question] = {}
        self.ended: dict[int, None] = {}  # jobs that are remembered though they ended, oldest first
        self.timers: list[Timer] = []
        self.timer_order = 0
        self.schedule_ns: int | None = None  # when the queue is looked at next
        self.queue_wake_ns: int | None = None  # when it wants to be, although nothing happened
        self.capacity_changed = False
        self.commands: list[Command] = []
        # Kept from jobs, not in snapshots:
        self.dependants: dict[int, dict[int, None]] = {}
        self.namesakes: dict[tuple[str, str], dict[int, None]] = {}
        self.after_kinds: dict[int, dict[int, list[str]]] = {}  # of jobs that wait, as it is asked
        self.awaited_of: dict[str, int] = {}  # pairs of a user's jobs and those they wait for
        self.trials: dict[tuple[str, str, int, int], int] = {}  # jobs by what ``trial_of`` names
        self.kept: dict[int, None] = {}  # jobs that wait, and whose nodes keep their memory
        self.node_rates: NodeRates | None = None
        self.wanting: dict[int, None] = {}  # jobs that hold nodes and may want more of them
        self.machines: dict[int, PipelineMachine] = {}  # of runs of pipelines
        self.step_jobs: dict[int, tuple[int, str]] = {}  # jobs that do a step: run and task
        self.changed_steps: dict[int, None] = {}  # of them, those that just began or ended

    @property
    def policy(self) -> Policy:
        """What the site decided."""
        return self.view.policy

    @property
    def now_ns(self) -> int:
        """The time of the event in hand."""
        return self.view.now_ns

    @property
    def storage_away(self) -> bool:
        """Whether remote storage gives nothing just now, as far as one was told."""
        return self.flush.bytes_per_second == 0

    def emit(self, target: tuple[int, ...], body: CommandBody) -> Command:
        """Adds a command to the answer."""
        command = Command(self.sequence, len(self.commands), self.epoch, target, body)
        self.commands.append(command)
        return command

    def notify(self, why: Reason, *, job: int = 0, node: int = -1, level: Level = "info") -> None:
        """Tells people."""
        self.emit((), Notify(reason=why, job=job, node=node, level=level))

    def wake(self, at_ns: int, kind: str, about: int, token: int = 0) -> None:
        """Asks to be woken. The token says whether the reason still holds when the time comes."""
        self.timer_order += 1
        heappush(self.timers, (at_ns, self.timer_order, kind, about, token))

    def due(self) -> Timer | None:
        """The next timer whose time has come, taken off the list."""
        if self.timers and self.timers[0][0] <= self.now_ns:
            return heappop(self.timers)
        return None

    def note_step(self, job: ClusterJob) -> None:
        """Keeps in mind that a job of a pipeline's step began or ended."""
        if job.id in self.step_jobs:
            self.changed_steps[job.id] = None

    def look_at_queue(self, *, capacity: bool = False) -> None:
        """Something changed that may start a job; changes are gathered for a moment."""
        self.capacity_changed |= capacity
        at_ns = self.now_ns + self.policy.queue.delay_ns
        if self.schedule_ns is None:
            self.schedule_ns = at_ns
            self.wake(at_ns, "schedule", 0)

    def wake_queue(self, at_ns: int) -> None:
        """The queue wants to be looked at then. One timer is enough: it asks again at each look."""
        if self.queue_wake_ns is None or at_ns < self.queue_wake_ns:
            self.queue_wake_ns = at_ns
            self.wake(at_ns, "queue", 0, at_ns)

    def note_wants(self, job: ClusterJob) -> None:
        """Keeps in mind a job that may want more nodes: for replicas, or to stand by."""
        placement = job.placement
        small = placement is not None and placement.replicas < job.wanted_replicas
        if small or job.spec.spares or job.own is not None:
            self.wanting[job.id] = None

    def live(self, number: int, generation: int) -> ClusterJob | None:
        """The job that a fact is about, if it speaks of the current generation."""
        job = self.view.jobs.get(number)
        if job is None or job.gang is None or job.generation != generation:
            return None
        return job
