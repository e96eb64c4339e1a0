"""Budgets of running jobs: a warning near the end, a stop at the end, unless forced."""

from __future__ import annotations

from phalanx.cluster.context import Context
from phalanx.cluster.gang.phases import gang_of
from phalanx.cluster.jobs.departure import depart_safely
from phalanx.cluster.jobs.job import ClusterJob, JobState
from phalanx.cluster.jobs.leave_cause import LeaveCause
from phalanx.cluster.jobs.requests import known
from phalanx.cluster.protocol.commands import Accept, Refuse
from phalanx.cluster.protocol.events import RaiseBudget
from phalanx.cluster.reasons import Reason, in_gpu_hours, reason
from phalanx.cluster.units import MILLION, SECOND_NS


def watch(ctx: Context, job: ClusterJob) -> None:
    """Wakes the core when a job reaches the warning, then the limit of its budget."""
    if not job.budget_gpu_seconds or job.forced or not job.allocated:
        return
    account = ctx.ledger.accounts[job.id]
    rate = account.gpus + account.spare_gpus
    limit = job.budget_gpu_seconds * SECOND_NS
    next_stop = limit if job.budget_warned else _warning_gpu_ns(ctx, job)
    left = next_stop - ctx.ledger.used_gpu_ns(job.id)
    if rate:
        ctx.wake(ctx.now_ns + max(0, -(-left // rate)), "budget", job.id, job.started_ns)


def check(ctx: Context, job: ClusterJob) -> None:
    """Warns near the end of a budget and stops the job at its end, unless it is forced."""
    if job.forced or not job.budget_gpu_seconds or job.state == JobState.DRAINING:
        return
    used = ctx.ledger.used_gpu_ns(job.id)
    hours = in_gpu_hours(job.budget_gpu_seconds)
    limit = job.budget_gpu_seconds * SECOND_NS
    if used >= limit:
        why = LeaveCause.BUDGET.because(gpu_hours=hours)
        depart_safely(ctx, job, JobState.FAILED, why)
        return
    if used >= _warning_gpu_ns(ctx, job) and not job.budget_warned:
        job.budget_warned = True
        why = reason("budget_nearly", percent=used * 100 // limit, gpu_hours=hours)
        ctx.notify(why, job=job.id, level="warning")
    watch(ctx, job)


def on_raise(ctx: Context, fact: RaiseBudget) -> None:
    """More budget for a job, or leave to go on above it."""
    job = known(ctx, fact.job, fact.request)
    if job is None:
        return
    if fact.budget_gpu_seconds < 0:
        value, rule = str(fact.budget_gpu_seconds), "must not be negative (0: no budget)"
        why = reason("bad_field", key="budget_gpu_seconds", value=value, rule=rule)
        ctx.emit((), Refuse(reason=why, request=fact.request, job=job.id))
        return
    ending = _ends_for_budget(job)
    if ending and not _enough(ctx, job, fact):
        used = ctx.ledger.used_gpu_ns(job.id) // SECOND_NS
        why = reason("budget_used", job=job.id, used=used)
        ctx.emit((), Refuse(reason=why, request=fact.request, job=job.id))
        return
    job.budget_gpu_seconds, job.forced = fact.budget_gpu_seconds, fact.forced
    job.budget_warned = False
    if ending:
        _goes_on(job)
    watch(ctx, job)
    ctx.emit((), Accept(reason=reason("accepted"), request=fact.request, job=job.id))


def _ends_for_budget(job: ClusterJob) -> bool:
    """Whether a job is about to end since it has used its budget."""
    gang = job.gang
    if gang is None or gang.ending != JobState.FAILED:
        return False
    return LeaveCause.of(gang.ending_why) is LeaveCause.BUDGET


def _enough(ctx: Context, job: ClusterJob, fact: RaiseBudget) -> bool:
    used, budget = ctx.ledger.used_gpu_ns(job.id), fact.budget_gpu_seconds
    return fact.forced or not budget or budget * SECOND_NS > used


def _goes_on(job: ClusterJob) -> None:
    """A job that stops for its budget has one again: it comes back, or does not leave at all."""
    gang = gang_of(job)
    if gang.phase == "draining":
        gang.ending, gang.ending_why = JobState.PENDING, reason("budget_raised")
        job.why = gang.ending_why
    else:  # it forms to save what it had in memory
        gang.ending, gang.ending_why = None, Reason("")


def _warning_gpu_ns(ctx: Context, job: ClusterJob) -> int:
    share = ctx.policy.price.budget_warning_ppm
    return job.budget_gpu_seconds * SECOND_NS * share // MILLION
