"""The core: events in, commands out.

``handle`` lets time pass, fires the timers that are due, gives the event to its handler and looks
at the queue. Nothing here reads a clock, so a log replayed gives the same state to the last bit.
"""

from __future__ import annotations

from heapq import heappop

from phalanx.cluster import sense
from phalanx.cluster.context import Context, Question
from phalanx.cluster.fabric import checks as fabric_checks
from phalanx.cluster.fleet import spare_pool as pool
from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.gang import node_rates
from phalanx.cluster.gang.seen_failures import SeenFailures, seen
from phalanx.cluster.handlers import ABOUT_NODES, HANDLERS, take_over
from phalanx.cluster.jobs.feasibility import policy_problems
from phalanx.cluster.ledger.ledger import Ledger
from phalanx.cluster.pipeline_runs import follow_jobs
from phalanx.cluster.pipelines.machine import PipelineMachine
from phalanx.cluster.policy import Policy
from phalanx.cluster.protocol.commands import Command
from phalanx.cluster.protocol.events import ControllerStarted, Event
from phalanx.cluster.queue.decisions import QueueState
from phalanx.cluster.queue.queue import Queue
from phalanx.cluster.snapshot import FORMAT_VERSION, SnapshotError, VersionError, dump, load
from phalanx.cluster.state import View
from phalanx.cluster.timers import TIMERS, stale
from phalanx.config import ConfigError

__all__ = ["FORMAT_VERSION", "Core", "SequenceError", "SnapshotError", "VersionError"]

MOST_TIMERS = 1_000  # that fire with one event: nothing holds the core up for long


class SequenceError(Exception):
    """An event was left out or came twice: the log and the core no longer agree."""


class Core:
    """The state machine. One instance a fleet; ``view`` and ``ledger`` are there to be read."""

    def __init__(self, fleet: Fleet, policy: Policy, epoch: int = 1, now_ns: int = 0) -> None:
        problems = policy_problems(policy)
        if problems:
            raise ConfigError.of(problems)
        view = View(fleet, policy, now_ns)
        self._ctx = Context(view, Queue(QueueState()), Ledger(now_ns), epoch)
        pool.fill_pool(self._ctx)

    @property
    def view(self) -> View:
        """Fleet, jobs, quotas, reservations."""
        return self._ctx.view

    @property
    def ledger(self) -> Ledger:
        """Where the time went."""
        return self._ctx.ledger

    @property
    def queue(self) -> Queue:
        """The queue, to ask it why a job waits."""
        return self._ctx.queue

    @property
    def sequence(self) -> int:
        """Of the last event."""
        return self._ctx.sequence

    @property
    def epoch(self) -> int:
        """Of the controller whose commands these are."""
        return self._ctx.epoch

    def failures(self, now_ns: int) -> list[SeenFailures]:
        """How often nodes fail, by kind."""
        return seen(self._ctx.health, self.view.policy.health, now_ns)

    def failures_per_million_node_days(self, nodes: tuple[int, ...]) -> int:
        """How often some nodes fail on average, as nodes with eight GPUs."""
        return node_rates.rated(self._ctx, nodes).rate

    @property
    def writing(self) -> dict[int, int]:
        """Jobs that may write a checkpoint to remote storage now, and until when."""
        return self._ctx.flush.writing

    @property
    def questions(self) -> dict[int, Question]:
        """What a person must decide."""
        return self._ctx.questions

    def pipeline_machine(self, number: int) -> PipelineMachine:
        """How far a run of a pipeline is."""
        return self._ctx.machines[number]

    @property
    def withheld(self) -> dict[int, str]:
        """Nodes that are not taken out before a person says so, and why they would be."""
        return self._ctx.health.withheld

    def handle(self, event: Event) -> list[Command]:
        """Takes in the next event of the log; returns what is to be done about it."""
        ctx = self._ctx
        if event.sequence != ctx.sequence + 1:
            raise SequenceError(f"event {event.sequence} after event {ctx.sequence}")
        ctx.sequence = event.sequence
        ctx.commands = []
        if event.time_ns > ctx.now_ns:
            ctx.view.now_ns = event.time_ns
            ctx.ledger.advance(ctx.view, event.time_ns)
        body = event.body
        if isinstance(body, ControllerStarted):
            take_over(ctx, body)  # what fell due while no controller ran is decided under its rule
        for _ in range(MOST_TIMERS):  # what else is due is due for the next event
            timer = ctx.due()
            if timer is None:
                break
            TIMERS[timer[2]](ctx, timer[3], timer[4])
        there = not isinstance(body, ABOUT_NODES) or 0 <= body.node < len(ctx.fleet)
        if there and not sense.refused(ctx, body):
            HANDLERS[type(body)](ctx, body)
        follow_jobs(ctx)
        fabric_checks.follow(ctx)
        while ctx.timers and stale(ctx, *ctx.timers[0][2:]):
            heappop(ctx.timers)  # nobody need be woken, and log a tick, for nothing
        return ctx.commands

    def next_deadline_ns(self) -> int | None:
        """When the core wants a ``Tick`` at the latest; None: not at all."""
        timers = self._ctx.timers
        return timers[0][0] if timers else None

    def snapshot(self) -> bytes:
        """The whole state, to go on from elsewhere."""
        return dump(self._ctx)

    @classmethod
    def restore(cls, data: bytes) -> Core:
        """The core that ``snapshot`` wrote."""
        core = cls.__new__(cls)
        core._ctx = load(data)
        core.queue.prepare(core.view)
        return core
