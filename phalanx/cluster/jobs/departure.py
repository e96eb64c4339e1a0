"""How a job leaves its nodes: at once, or with its state made safe first, within a time."""

from __future__ import annotations

from phalanx.cluster.context import Context
from phalanx.cluster.gang import left_memory
from phalanx.cluster.gang.draining import drain, hurry
from phalanx.cluster.gang.fence import fence_left
from phalanx.cluster.gang.losses import tell_left, unsaved, why_gone
from phalanx.cluster.gang.orders import stop_on
from phalanx.cluster.gang.phases import gang_of, timeouts_of
from phalanx.cluster.jobs.horizon import leave_ns
from phalanx.cluster.jobs.job import ClusterJob, JobState
from phalanx.cluster.jobs.leave_cause import FOR_OTHERS, LeaveCause
from phalanx.cluster.jobs.lifecycle import end, let_in, release, take_over_change
from phalanx.cluster.reasons import Reason, reason, span_of


def leave(
    ctx: Context,
    job: ClusterJob,
    state: JobState,
    why: Reason,
    *,
    keep_memory: bool = False,
    keep_ns: int = 0,
) -> None:
    """A job gives its nodes back at once and becomes ``state``; pending: it is queued again.

    ``keep_memory``: it did not want to, and may get the same nodes again soon; ``keep_ns``: they
    keep it for longer than usual.
    """
    assert job.placement is not None
    nodes = dict.fromkeys(job.placement.nodes + job.placement.spares + gang_of(job).leftover)
    if state != JobState.DONE:  # its program has not said that it ended
        fence_left(ctx, job, nodes)
    stays = (
        left_memory.keep(ctx, job, keep_ns) if keep_memory and state == JobState.PENDING else None
    )
    if stays is not None:
        holders = tuple(node for node in nodes if node in stays.nodes and node not in stays.lost)
        nodes = dict.fromkeys(node for node in nodes if node not in holders)
        stop_on(ctx, job, holders, keep_snapshots=True)
        left_memory.stay(ctx, job, stays)
    elif state in (JobState.PENDING, JobState.FAILED):
        tell_left(ctx, job, why_gone(ctx, job, why), again=state == JobState.PENDING)
    stop_on(ctx, job, tuple(nodes), keep_snapshots=False)
    release(ctx, job)
    if state == JobState.PENDING:
        if LeaveCause.of(why) is LeaveCause.TIME_LIMIT:
            # The next allocation has the whole limit again, and is waited for like the first.
            job.ran_ns = job.waited_ns = 0
        job.state = JobState.PENDING
        take_over_change(ctx, job)
        let_in(ctx, job)
        job.why = job.why if job.held else why
    else:
        end(ctx, job, state, why)


def depart_safely(
    ctx: Context, job: ClusterJob, ending: JobState, why: Reason, *, by_ns: int = 0
) -> None:
    """Makes a job leave its nodes; steps that are in memory alone are written first.

    A gang that forms just now does so, if it can, and is drained then: see ``on_ready``.
    ``by_ns``: when it must be gone; 0: it takes the time that it needs.
    """
    gang = gang_of(job)
    if gang.ending is not None:
        ending, why = gang.ending, gang.ending_why
    sooner = by_ns and (not gang.leave_by_ns or by_ns < gang.leave_by_ns)
    if sooner:
        gang.leave_by_ns = by_ns
    if gang.phase == "running":
        drain(ctx, job, drain_limit_ns(ctx, job, why), ending, why)
    elif gang.phase == "draining":
        if sooner and by_ns < gang.deadline_ns:
            hurry(ctx, job, max(1, by_ns - ctx.now_ns))
    elif unsaved(job):
        gang.ending, gang.ending_why = ending, why
        if sooner:
            ctx.wake(by_ns, "leave_by", job.id, job.started_ns)
    else:
        leave(ctx, job, ending, why)


def drain_limit_ns(ctx: Context, job: ClusterJob, why: Reason) -> int:
    """How long a gang may take to save its state and go."""
    by_ns, usual = gang_of(job).leave_by_ns, timeouts_of(ctx, job).drain_ns
    if not by_ns:
        return usual
    left = max(1, by_ns - ctx.now_ns)
    if LeaveCause.of(why) in FOR_OTHERS:
        return left
    return min(left, max(usual, ctx.policy.queue.grace_ns))


def must_be_gone(ctx: Context, job: ClusterJob) -> None:
    """The time is over that a gang had to form and save its state before it leaves."""
    gang = gang_of(job)
    if gang.ending is not None and gang.phase != "draining" and ctx.now_ns >= gang.leave_by_ns > 0:
        leave(ctx, job, gang.ending, gang.ending_why, keep_memory=True)


def give_way(ctx: Context, job: ClusterJob, grace_ns: int, why: Reason) -> None:
    """A job leaves for others within its grace; one that leaves already may have to be quicker."""
    job.preemptions += gang_of(job).ending is None
    depart_safely(ctx, job, JobState.PENDING, why, by_ns=ctx.now_ns + grace_ns)


def deadline(ctx: Context, number: int, _token: int) -> None:
    """A job's last moment to start has come, or that to end: what runs makes a checkpoint first."""
    job = ctx.view.jobs.get(number)
    if job is None or job.ended:
        return
    why = LeaveCause.DEADLINE.because(step=job.step)
    if ctx.now_ns < job.spec.deadline_ns:
        if job.placement is not None:
            ctx.wake(job.spec.deadline_ns, "deadline", job.id)
            return
        needed = span_of(job.spec.deadline_ns - ctx.now_ns)
        why = reason("deadline_unreachable", needed=needed)
    if job.placement is None:
        end(ctx, job, JobState.FAILED, why)
    else:
        depart_safely(ctx, job, JobState.FAILED, why)


def time_limit(ctx: Context, job: ClusterJob) -> None:
    """A job's time is over: it makes a checkpoint and leaves."""
    limit = job.time_limit_ns
    why = LeaveCause.TIME_LIMIT.because(seconds=limit // 10**9, step=job.step)
    ending: JobState = JobState.PENDING if job.spec.requeue_at_limit else JobState.FAILED
    assert job.placement is not None
    spare_ns, end_ns = leave_ns(ctx.view, job), job.started_ns + max(0, limit - job.ran_ns)
    due_ns = ctx.queue.promises.first_start_ns(job.placement.nodes)
    if gang_of(job).ending is None:
        promised = due_ns is not None and due_ns < ctx.now_ns + 2 * spare_ns
        depart_safely(ctx, job, ending, why, by_ns=ctx.now_ns + spare_ns if promised else 0)
        if job.gang is None:
            return  # nothing had to be saved
        ctx.wake(end_ns + spare_ns, "time_limit", job.id, job.started_ns)
    elif gang_of(job).phase != "draining" and due_ns is not None and ctx.now_ns > end_ns:
        # It forms only to save what it has in memory, and others were promised its nodes.
        leave(ctx, job, ending, why)
