"""The core: events in, commands out.

``handle`` lets time pass, fires the timers that are due, gives the event to its handler and looks
at the queue. Nothing here reads a clock, so a log replayed gives the same state to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop
from typing import Any

from phalanx.cluster import sense
from phalanx.cluster.context import Context, Question
from phalanx.cluster.fleet import evacuation as vacate
from phalanx.cluster.fleet import health, renewal
from phalanx.cluster.fleet import node_events as nodes
from phalanx.cluster.fleet import spare_pool as pool
from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.gang import draining, formation, progress
from phalanx.cluster.gang.orders import outstanding
from phalanx.cluster.gang.phases import gang_of, token
from phalanx.cluster.jobs import budget, departure, elastic, lifecycle, requests, submission
from phalanx.cluster.jobs import write_leases as storage
from phalanx.cluster.jobs.feasibility import policy_problems
from phalanx.cluster.jobs.job import Job
from phalanx.cluster.ledger.accounts import Ledger
from phalanx.cluster.placement.choose import defragment
from phalanx.cluster.policy import Policy
from phalanx.cluster.protocol.commands import Command, Proposal
from phalanx.cluster.protocol.events import (
    Answer,
    Cancel,
    CheckResult,
    ControllerStarted,
    Corruption,
    DataStarved,
    Defragment,
    DeviceError,
    DrainNode,
    Event,
    FlushWanted,
    GangDrained,
    GangJoined,
    GangReady,
    GangStopped,
    GangStuck,
    Hold,
    JobFinished,
    KeeperSilent,
    LossSpike,
    NodeJoined,
    NodeNotice,
    NodeRepaired,
    NodeSeen,
    NodeSilent,
    NoProgress,
    Progress,
    QuarantineNode,
    RaiseBudget,
    ReadmitNode,
    Requeue,
    RestoreFailed,
    Scale,
    SetQuota,
    SetReservation,
    SlowRank,
    StorageSlow,
    Submit,
    SubmitWorkflow,
    ThroughputRegression,
    Tick,
    WorkerExited,
)
from phalanx.cluster.queue import site_orders as orders
from phalanx.cluster.queue.decisions import Preempt, QueueState, Resize, Start
from phalanx.cluster.queue.queue import Queue
from phalanx.cluster.reasons import reason, sentences
from phalanx.cluster.recovery import agent_ends, incidents, left_memory, losses, own_failures
from phalanx.cluster.recovery import recover as recovery
from phalanx.cluster.snapshot import FORMAT_VERSION, SnapshotError, VersionError, dump, load
from phalanx.cluster.state import View
from phalanx.config import ConfigError

__all__ = ["FORMAT_VERSION", "Core", "SequenceError", "SnapshotError", "VersionError"]

MOST_TIMERS = 1_000  # that fire with one event: nothing holds the core up for long

sentences({"moves": "moves that would make room: {count}"})


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

    @property
    def writing(self) -> dict[int, int]:
        """Jobs that may write a checkpoint to remote storage now, and until when."""
        return self._ctx.flush.writing

    @property
    def questions(self) -> dict[int, Question]:
        """What a person must decide."""
        return self._ctx.questions

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
        for _ in range(MOST_TIMERS):  # what else is due is due for the next event
            timer = ctx.due()
            if timer is None:
                break
            _TIMERS[timer[2]](ctx, timer[3], timer[4])
        body = event.body
        there = not isinstance(body, _ABOUT_NODES) or 0 <= body.node < len(ctx.fleet)
        if there and not sense.refused(ctx, body):
            _HANDLERS[type(body)](ctx, body)
        while ctx.timers and _stale(ctx, *ctx.timers[0][2:]):
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
        return core


def _on_joined(ctx: Context, fact: GangJoined) -> None:
    if not agent_ends.judged(ctx, fact):
        formation.on_joined(ctx, fact)


def _on_ready(ctx: Context, fact: GangReady) -> None:
    if formation.on_ready(ctx, fact):
        job = ctx.view.jobs[fact.job]
        own_failures.restored(ctx, job)
        budget.watch(ctx, job)
        gang = gang_of(job)
        if gang.ending is not None:  # it only formed to save what it had in memory
            limit = departure.drain_limit_ns(ctx, job, gang.ending_why)
            draining.drain(ctx, job, limit, gang.ending, gang.ending_why)
        elif job.placement and job.placement.replicas < job.wanted_replicas:
            ctx.look_at_queue(capacity=True)
        else:  # fewer may have been asked for while it formed
            wanted = job.wanted_replicas
            elastic.resize(ctx, job, wanted, reason("scale", replicas=wanted))
        # What could take its place, or stand by for it, may have come meanwhile.
        if vacate.wants_to(ctx, job) or elastic.lacks_spares(job):
            ctx.look_at_queue(capacity=True)


def _on_progress(ctx: Context, fact: Progress) -> None:
    known = ctx.view.jobs.get(fact.job)
    before = known.durable if known is not None else 0
    job = progress.on_progress(ctx, fact)
    if job is None:
        return
    own_failures.progressed(ctx, job)
    if job.durable > before:
        storage.written(ctx, job.id)


def _on_drained(ctx: Context, fact: GangDrained) -> None:
    job = draining.on_drained(ctx, fact)
    if job is not None:
        gang = gang_of(job)
        assert gang.ending is not None
        departure.leave(ctx, job, gang.ending, gang.ending_why)


def _on_finished(ctx: Context, fact: JobFinished) -> None:
    job = ctx.live(fact.job, fact.generation)
    if job is None:
        return
    # A program that has ended has ended, whatever steps it told of.
    if fact.step < job.committed and job.spec.reports_steps:
        rule = f"job {job.id} has committed step {job.committed}"
        ctx.notify(sense.nonsense(fact, "step", fact.step, rule), job=job.id, level="warning")
        return
    job.step = max(job.step, fact.step)
    gang = gang_of(job)
    if gang.only_saves and gang.ending is not None:  # before its agent was told to drain it
        departure.leave(ctx, job, gang.ending, gang.ending_why)
        return
    departure.leave(ctx, job, "done", reason("finished"))


def _on_defragment(ctx: Context, fact: Defragment) -> None:
    moves = defragment(ctx.view, lambda job: ctx.queue.kept_from(ctx.view, job))
    why = reason("moves", count=len(moves))
    ctx.emit((), Proposal(reason=why, request=fact.request, moves=moves))


def _on_controller(ctx: Context, fact: ControllerStarted) -> None:
    """A new controller: its epoch and policy rule, and what was not answered is said again."""
    ctx.epoch = max(ctx.epoch, fact.epoch)
    if fact.policy is not None:
        ctx.view.policy = fact.policy
    for number in list(ctx.view.active):
        job = ctx.view.jobs[number]
        assert job.placement is not None
        for order in outstanding(ctx, job):
            ctx.emit(job.placement.nodes, order)


def _on_tick(ctx: Context, fact: Tick) -> None:
    """The timers that were due have fired already."""


def _schedule(ctx: Context, _about: int, _token: int) -> None:
    ctx.schedule_ns = None
    changed, ctx.capacity_changed = ctx.capacity_changed, False
    if changed:
        renewal.take_over(ctx)
        health.examine_idle(ctx)
        elastic.use_capacity(ctx)
    for told in ctx.queue.windows.mend(ctx.view):
        ctx.notify(told, level="warning")
    pool.clear_windows(ctx)
    pool.lend_pool(ctx)
    for decision in ctx.queue.schedule(ctx.view):
        match decision:
            case Start():
                lifecycle.start(ctx, decision)
                budget.watch(ctx, ctx.view.jobs[decision.job])
            case Preempt():
                job = ctx.view.jobs[decision.job]
                grace_ns, why = decision.grace_ns, decision.reason
                if decision.for_job:
                    departure.give_way(ctx, job, grace_ns, why)
                else:
                    vacate.for_window(ctx, job, decision.window, grace_ns, why)
            case Resize():
                job = ctx.view.jobs[decision.job]
                elastic.resize(ctx, job, decision.replicas, decision.reason)
    if changed:
        vacate.move_on(ctx)
        elastic.use_the_rest(ctx)
    if ctx.queue.unfinished:
        ctx.look_at_queue(capacity=changed)
    later = ctx.queue.next_wake_ns(ctx.view)
    if later is not None:
        ctx.wake_queue(later)


def _queue_asked(ctx: Context, _about: int, asked_ns: int) -> None:
    if ctx.queue_wake_ns == asked_ns:
        ctx.queue_wake_ns = None
        ctx.look_at_queue(capacity=bool(ctx.view.reservations))  # the time of one may be over


def _gang_timer(then: Callable[[Context, Job], None]) -> Callable[[Context, int, int], None]:
    """A timer that means something only in the phase it was set in."""

    def fire(ctx: Context, number: int, held: int) -> None:
        job = ctx.view.jobs.get(number)
        if job is not None and job.gang is not None and token(job) == held:
            then(ctx, job)

    return fire


def _stale(ctx: Context, kind: str, about: int, held: int) -> bool:
    """Whether a timer would do nothing: its gang has gone on since it was set."""
    if kind == "queue":
        return ctx.queue_wake_ns != held
    if kind not in ("phase", "settle"):
        return False
    job = ctx.view.jobs.get(about)
    return job is None or job.gang is None or token(job) != held


def _allocation_timer(then: Callable[[Context, Job], None]) -> Callable[[Context, int, int], None]:
    """A timer that means something only in the allocation it was set in."""

    def fire(ctx: Context, number: int, started_ns: int) -> None:
        job = ctx.view.jobs.get(number)
        if job is not None and job.gang is not None and job.started_ns == started_ns:
            then(ctx, job)

    return fire


_TIMERS: dict[str, Callable[[Context, int, int], None]] = {
    "schedule": _schedule,
    "queue": _queue_asked,
    "capacity": lambda ctx, _about, _token: ctx.look_at_queue(capacity=True),
    "settle": _gang_timer(recovery.recover),
    "phase": _gang_timer(lambda ctx, job: incidents.no_answer(ctx, job, ())),
    "kept": left_memory.expire,
    "time_limit": _allocation_timer(departure.time_limit),
    "leave_by": _allocation_timer(departure.must_be_gone),
    "vacate": vacate.last_call,
    "budget": _allocation_timer(budget.check),
    "test": nodes.no_test,
    "ask": lambda ctx, number, _token: health.ask(ctx, number),
    "flush": lambda ctx, number, _token: storage.expired(ctx, number),
}

# Facts about a node that is not in the fleet say nothing.
_ABOUT_NODES = (
    NodeSilent,
    NodeSeen,
    NodeNotice,
    DeviceError,
    CheckResult,
    NodeRepaired,
    WorkerExited,
    RestoreFailed,
    SlowRank,
    KeeperSilent,
)

_HANDLERS: dict[type, Callable[[Context, Any], None]] = {
    Submit: submission.submit,
    SubmitWorkflow: submission.submit_workflow,
    Cancel: requests.cancel,
    Requeue: requests.requeue,
    Hold: requests.hold,
    Scale: elastic.on_scale,
    RaiseBudget: budget.on_raise,
    DrainNode: nodes.on_drain,
    ReadmitNode: nodes.on_readmit,
    QuarantineNode: nodes.on_quarantine,
    SetQuota: orders.on_quota,
    SetReservation: orders.on_reservation,
    Answer: nodes.on_answer,
    Defragment: _on_defragment,
    NodeJoined: nodes.on_joined,
    NodeSilent: nodes.on_silent,
    NodeSeen: nodes.on_seen,
    NodeNotice: nodes.on_notice,
    DeviceError: nodes.on_device_error,
    CheckResult: nodes.on_check_result,
    NodeRepaired: nodes.on_repaired,
    WorkerExited: incidents.on_worker_exited,
    GangJoined: _on_joined,
    GangStopped: losses.on_stopped,
    GangReady: _on_ready,
    GangStuck: incidents.on_stuck,
    GangDrained: _on_drained,
    RestoreFailed: formation.on_restore_failed,
    Progress: _on_progress,
    JobFinished: _on_finished,
    NoProgress: incidents.on_no_progress,
    SlowRank: incidents.on_slow_rank,
    ThroughputRegression: incidents.on_regression,
    DataStarved: incidents.on_starved,
    LossSpike: incidents.on_loss_spike,
    Corruption: incidents.on_corruption,
    KeeperSilent: incidents.on_keeper_silent,
    FlushWanted: storage.on_wanted,
    StorageSlow: storage.on_slow,
    ControllerStarted: _on_controller,
    Tick: _on_tick,
}
