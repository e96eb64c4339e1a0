"""What people ask of a job that is there: cancel it, send it back to the queue, hold it."""

from __future__ import annotations

from phalanx.cluster.context import Context
from phalanx.cluster.gang.draining import drain
from phalanx.cluster.jobs.departure import depart_safely, leave
from phalanx.cluster.jobs.job import ClusterJob, JobState
from phalanx.cluster.jobs.lifecycle import blocked, end, keep_out, let_in
from phalanx.cluster.protocol.commands import Accept, Refuse
from phalanx.cluster.protocol.events import Cancel, Hold, Requeue
from phalanx.cluster.reasons import Reason, reason
from phalanx.cluster.units import SECOND_NS


def cancel(ctx: Context, fact: Cancel) -> None:
    """Ends a job at once; a program that runs is asked to go first, and has a grace for that.

    Cancelled again it ends at once.
    """
    if fact.array:
        members = _live_members(ctx, fact.job, fact.request)
        for member in reversed(members):  # those that wait first: none takes another's turn
            end_job(ctx, member)
        if members:
            why = reason("array_cancelled", count=len(members))
            ctx.emit((), Accept(reason=why, request=fact.request, job=fact.job))
        return
    job = known(ctx, fact.job, fact.request)
    if job is not None:
        why = end_job(ctx, job)
        ctx.emit((), Accept(reason=why, request=fact.request, job=job.id))


def end_job(ctx: Context, job: ClusterJob) -> Reason:
    """Ends a job as a person's order does; says how."""
    why, grace_ns = reason("cancelled"), ctx.policy.recovery.cancel_grace_ns
    gang = job.gang
    if job.placement is None:
        end(ctx, job, JobState.CANCELLED, why)
    elif gang is not None and gang.phase == "running" and _is_asked(job) and grace_ns:
        drain(ctx, job, grace_ns, JobState.CANCELLED, why)
        why = reason("asked_to_end", job=job.id, seconds=grace_ns // SECOND_NS)
    else:
        leave(ctx, job, JobState.CANCELLED, why)
    return why


def _live_members(ctx: Context, number: int, request: str) -> list[ClusterJob]:
    """Jobs of an array that have not ended, by the number of any of them; [] is refused."""
    asked = ctx.view.jobs.get(number)
    if asked is None or asked.spec.array is None:
        code = "no_such_job" if asked is None else "no_array"
        ctx.emit((), Refuse(reason=reason(code, job=number), request=request, job=number))
        return []
    numbers = range(asked.array_parent, asked.array_parent + asked.spec.array.count)
    kept = (ctx.view.jobs.get(each) for each in numbers)
    members = [job for job in kept if job is not None and not job.ended]
    if not members:
        why = reason("array_ended", job=number)
        ctx.emit((), Refuse(reason=why, request=request, job=number))
    return members


def _is_asked(job: ClusterJob) -> bool:
    """Whether what runs is a program, which may have something to save or to tidy up."""
    return not job.spec.reports_steps


def requeue(ctx: Context, fact: Requeue) -> None:
    """Stops a job with a snapshot and puts it back into the queue, or keeps it out of it."""
    job = known(ctx, fact.job, fact.request)
    if job is None:
        return
    if refused_as_ending(ctx, job, fact.request):
        return
    if fact.hold and job.state in (JobState.PENDING, JobState.DRAINING):
        hold(ctx, Hold(job=job.id, request=fact.request, operator=fact.operator))
        return
    if job.placement is None or job.state == JobState.DRAINING:
        why = reason("not_running", job=job.id, state=job.state)
        ctx.emit((), Refuse(reason=why, request=fact.request, job=job.id))
        return
    job.held = fact.hold
    job.operator_hold = reason("held") if fact.hold and fact.operator else None
    told = reason("drained" if fact.hold else "requeued")
    depart_safely(ctx, job, JobState.PENDING, told)
    ctx.emit((), Accept(reason=told, request=fact.request, job=job.id))


def hold(ctx: Context, fact: Hold) -> None:
    """Keeps a job out of the queue, or lets it in again; one that drains stays out afterwards."""
    if fact.array:
        _hold_array(ctx, fact)
        return
    job = known(ctx, fact.job, fact.request)
    if job is None:
        return
    if job.state not in (JobState.PENDING, JobState.DRAINING):
        why = reason("not_pending", job=job.id, state=job.state)
        ctx.emit((), Refuse(reason=why, request=fact.request, job=job.id))
        return
    if fact.held and refused_as_ending(ctx, job, fact.request):
        return
    if not fact.held and job.operator_hold is not None and not fact.operator:
        why = reason("operator_holds", job=job.id, why=str(job.operator_hold))
        ctx.emit((), Refuse(reason=why, request=fact.request, job=job.id))
        return
    _keep_or_let_in(ctx, job, fact)
    ctx.emit((), Accept(reason=reason("accepted"), request=fact.request, job=job.id))


def _hold_array(ctx: Context, fact: Hold) -> None:
    """The same of all members that wait; those that an operator holds stay held for users."""
    members = _live_members(ctx, fact.job, fact.request)
    waiting = [
        job
        for job in members
        if job.state == JobState.PENDING
        and (fact.held or fact.operator or job.operator_hold is None)
    ]
    for job in waiting:
        _keep_or_let_in(ctx, job, fact)
    if members:
        why = reason("array_held" if fact.held else "array_released", count=len(waiting))
        ctx.emit((), Accept(reason=why, request=fact.request, job=fact.job))


def _keep_or_let_in(ctx: Context, job: ClusterJob, fact: Hold) -> None:
    if fact.operator:
        job.operator_hold = reason("held") if fact.held else None
    changed, job.held = job.held != fact.held, fact.held
    if changed and fact.held and job.id in ctx.view.pending:
        keep_out(ctx, job)
    elif changed and not fact.held and job.state == JobState.PENDING and not blocked(ctx, job):
        let_in(ctx, job)


def refused_as_ending(ctx: Context, job: ClusterJob, request: str) -> bool:
    """Whether a job ends for good as soon as its state is safe: too late to keep it."""
    gang = job.gang
    if gang is None or gang.ending is None or gang.ending == JobState.PENDING:
        return False
    why = reason("leaving", job=job.id, why=str(gang.ending_why))
    ctx.emit((), Refuse(reason=why, request=request, job=job.id))
    return True


def known(ctx: Context, number: int, request: str) -> ClusterJob | None:
    """A job that has not ended; otherwise the request is refused."""
    job = ctx.view.jobs.get(number)
    if job is not None and not job.ended:
        return job
    if job is None:
        why = reason("no_such_job", job=number)
    else:
        why = reason("job_ended", job=number, state=job.state)
    ctx.emit((), Refuse(reason=why, request=request, job=number))
    return None
