"""The phases of a gang and their deadlines: which timer still speaks of which phase."""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.context import Context
from phalanx.cluster.gang import failure_rates
from phalanx.cluster.jobs.horizon import leave_ns
from phalanx.cluster.jobs.job import ClusterJob, Gang, Phase
from phalanx.cluster.protocol.timeouts import Timeouts, derive


def gang_of(job: ClusterJob) -> Gang:
    """The gang of a job that has one."""
    assert job.gang is not None
    return job.gang


def timeouts_of(ctx: Context, job: ClusterJob) -> Timeouts:
    """The deadlines of a job, from its measured step time where there is one."""
    expected = job.spec.expected
    derived = derive(ctx.policy.timeouts, expected, job.step_ns or expected.step_ns)
    if job.step_ns:
        return derived
    # Nobody knows yet what a step takes: the first one has as long as it may without a hang.
    return structs.replace(derived, drain_ns=max(derived.drain_ns, derived.hang_ns))


def last_call_ns(ctx: Context, job: ClusterJob, deadline_ns: int) -> int:
    """When a job must begin to leave so that it is gone, with its state safe, by a deadline.

    Twice the time that it should take: storage may be slow, or the gang just form again.
    """
    needs_ns = max(leave_ns(ctx.view, job), timeouts_of(ctx, job).drain_ns)
    return deadline_ns - 2 * needs_ns


def enter(ctx: Context, job: ClusterJob, phase: Phase, limit_ns: int, attempts: int = 0) -> int:
    """Moves a gang to a phase that must end within a time; returns the deadline.

    Whoever gathers the answers says at the deadline who is missing; should nobody say it, the core
    wakes up by itself a little later.
    """
    gang = gang_of(job)
    failure_rates.ends_running(ctx, gang)
    gang.phase = phase
    gang.since_ns = ctx.now_ns
    gang.attempts = attempts
    gang.ready_step = -1
    deadline = ctx.now_ns + limit_ns
    ctx.wake(deadline + ctx.policy.timeouts.round_trip_ns, "phase", job.id, token(job))
    return deadline


def token(job: ClusterJob) -> int:
    """Tells whether a timer of a gang still speaks of the same generation, phase and attempt."""
    phases = ("settling", "joining", "restoring", "running", "draining")
    gang = gang_of(job)
    return job.generation * 64 + phases.index(gang.phase) * 8 + min(gang.attempts, 7)
