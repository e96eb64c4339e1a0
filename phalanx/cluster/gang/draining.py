"""How a gang leaves: it is asked to make its state safe, within a time."""

from __future__ import annotations

from phalanx.cluster.context import Context
from phalanx.cluster.gang.orders import drain_order
from phalanx.cluster.gang.phases import enter, gang_of
from phalanx.cluster.jobs.job import ClusterJob, JobState
from phalanx.cluster.protocol.events import GangDrained
from phalanx.cluster.reasons import Reason, reason


def drain(ctx: Context, job: ClusterJob, limit_ns: int, ending: JobState, why: Reason) -> None:
    """Asks a running gang to stop with its state safe; what it becomes then is ``ending``."""
    gang, placement = gang_of(job), job.placement
    assert placement is not None
    gang.ending, gang.ending_why = ending, why
    job.state, job.why = JobState.DRAINING, why
    gang.deadline_ns = enter(ctx, job, "draining", limit_ns)
    ctx.emit(placement.nodes, drain_order(job))


def hurry(ctx: Context, job: ClusterJob, limit_ns: int) -> None:
    """A gang that saves its state to leave has less time for that than it was told."""
    gang, placement = gang_of(job), job.placement
    assert placement is not None
    gang.deadline_ns = enter(ctx, job, "draining", limit_ns, gang.attempts)
    ctx.emit(placement.nodes, drain_order(job))


def on_drained(ctx: Context, fact: GangDrained) -> ClusterJob | None:
    """The gang has stopped; the job if it was asked to."""
    job = ctx.live(fact.job, fact.generation)
    if job is None or gang_of(job).ending is None:
        return None
    job.step = max(job.step, fact.step)  # no report said more of its last steps
    if fact.durable:
        job.add_durable(fact.step)
    tell_bare(ctx, job)
    return job


def tell_bare(ctx: Context, job: ClusterJob) -> None:
    """A job leaves, to come back, and nothing of it is safe anywhere."""
    bare = not job.durable and not job.committed
    if bare and gang_of(job).ending == "pending":
        ctx.notify(reason("bare"), job=job.id, level="warning")
