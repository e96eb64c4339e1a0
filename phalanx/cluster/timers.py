"""What the core does when a time has come: one function a kind of timer.

The look at the queue is one of them: it is asked for by all that changes something, and gathers
these changes for a moment.
"""

from __future__ import annotations

from collections.abc import Callable

from phalanx.cluster import pipeline_runs as pipelines
from phalanx.cluster.context import Context
from phalanx.cluster.fabric import checks as fabric_checks
from phalanx.cluster.fleet import evacuation, health, renewal
from phalanx.cluster.fleet import node_events as nodes
from phalanx.cluster.fleet import spare_pool as pool
from phalanx.cluster.gang import failure_rates, left_memory
from phalanx.cluster.gang.fence import ready_again
from phalanx.cluster.gang.phases import token
from phalanx.cluster.handlers import on_ready
from phalanx.cluster.jobs import budget, departure, elastic, lifecycle
from phalanx.cluster.jobs import write_leases as storage
from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.queue.decisions import CheckFirst, Preempt, Resize, Start
from phalanx.cluster.recovery import incidents
from phalanx.cluster.recovery import recover as recovery


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
                job = ctx.view.jobs[decision.job]
                lifecycle.start(ctx, job, decision.placement, decision.reason)
                budget.watch(ctx, job)
            case Preempt():
                job = ctx.view.jobs[decision.job]
                grace_ns, why = decision.grace_ns, decision.reason
                if decision.for_job:
                    departure.give_way(ctx, job, grace_ns, why)
                else:
                    evacuation.for_window(ctx, job, decision.window, grace_ns, why)
            case Resize():
                job = ctx.view.jobs[decision.job]
                elastic.resize(ctx, job, decision.replicas, decision.reason)
            case CheckFirst():
                fabric_checks.before_gang(ctx, decision.job, decision.nodes, decision.until_ns)
    if changed:
        evacuation.move_on(ctx)
        elastic.use_the_rest(ctx)
    fabric_checks.look(ctx)
    if ctx.queue.unfinished:
        ctx.look_at_queue(capacity=changed)
    later = ctx.queue.next_wake_ns(ctx.view)
    if later is not None:
        ctx.wake_queue(later)


def _look_at_rates(ctx: Context, _about: int, _token: int) -> None:
    failure_rates.look_again(ctx)
    pool.follow_rate(ctx)
    if ctx.wanting:  # what did not pay may do so now
        ctx.look_at_queue(capacity=True)


def _queue_asked(ctx: Context, _about: int, asked_ns: int) -> None:
    if ctx.queue_wake_ns == asked_ns:
        ctx.queue_wake_ns = None
        ctx.look_at_queue(capacity=bool(ctx.view.reservations))  # the time of one may be over


def _gang_timer(then: Callable[[Context, ClusterJob], None]) -> Callable[[Context, int, int], None]:
    """A timer that means something only in the phase it was set in."""

    def fire(ctx: Context, number: int, held: int) -> None:
        job = ctx.view.jobs.get(number)
        if job is not None and job.gang is not None and token(job) == held:
            then(ctx, job)

    return fire


def _allocation_timer(
    then: Callable[[Context, ClusterJob], None],
) -> Callable[[Context, int, int], None]:
    """A timer that means something only in the allocation it was set in."""

    def fire(ctx: Context, number: int, started_ns: int) -> None:
        job = ctx.view.jobs.get(number)
        if job is not None and job.gang is not None and job.started_ns == started_ns:
            then(ctx, job)

    return fire


def _unfenced(ctx: Context, job: ClusterJob) -> None:
    """What ran before has ended: the gang that waited for it goes."""
    for fact in ready_again(job):
        on_ready(ctx, fact)


def stale(ctx: Context, kind: str, about: int, wake_token: int) -> bool:
    """Whether a timer would do nothing: its gang has gone on since it was set."""
    if kind == "queue":
        return ctx.queue_wake_ns != wake_token
    if kind == "fabric":
        return ctx.view.fabric_checks.wake_ns != wake_token
    if kind == "fabric_limit":
        running = ctx.view.fabric_checks.running
        return running is None or running.job != about
    if kind == "pipeline":
        run = ctx.view.pipelines.get(about)
        return run is None or run.wake_ns != wake_token
    if kind not in ("phase", "settle", "fence"):
        return False
    job = ctx.view.jobs.get(about)
    return job is None or job.gang is None or token(job) != wake_token


TIMERS: dict[str, Callable[[Context, int, int], None]] = {
    "schedule": _schedule,
    "queue": _queue_asked,
    "capacity": lambda ctx, _about, _token: ctx.look_at_queue(capacity=True),
    "settle": _gang_timer(recovery.recover),
    "phase": _gang_timer(lambda ctx, job: incidents.no_answer(ctx, job, ())),
    "fence": _gang_timer(_unfenced),
    "kept": left_memory.expire,
    "begin": lifecycle.begin,
    "deadline": departure.deadline,
    "time_limit": _allocation_timer(departure.time_limit),
    "leave_by": _allocation_timer(departure.must_be_gone),
    "vacate": evacuation.last_call,
    "budget": _allocation_timer(budget.check),
    "pipeline": pipelines.time_passed,
    "rates": _look_at_rates,
    "fabric": fabric_checks.woken,
    "fabric_limit": fabric_checks.time_over,
    "test": nodes.no_test,
    "ask": lambda ctx, number, _token: health.ask(ctx, number),
    "flush": lambda ctx, number, _token: storage.expired(ctx, number),
}
