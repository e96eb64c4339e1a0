"""Agents that end while they start a job: at the second, the job is blamed and not the nodes."""

from __future__ import annotations

from phalanx.cluster.context import Context
from phalanx.cluster.gang.phases import gang_of
from phalanx.cluster.jobs import dependencies
from phalanx.cluster.jobs.departure import leave
from phalanx.cluster.jobs.job import ClusterJob, JobState
from phalanx.cluster.jobs.lifecycle import keep_out
from phalanx.cluster.protocol.events import GangJoined
from phalanx.cluster.reasons import reason
from phalanx.cluster.units import SECOND_NS

PROGRAM_NS = 10 * SECOND_NS  # a program tells of no steps: once it has run for so long it started


def ended(ctx: Context, node: int, at_ns: int) -> bool:
    """A node's agent ended by itself. Whether a job that was starting there may have done it.

    One such end may be anything. When an agent ends at the next start of the same job too, on
    whatever node, or again at the same start, the job is taken out of the queue. Agents that end
    together at one start are one event: somebody may have restarted them all.

    A gang that had been told to make steps may have made some that nobody has told of yet: that
    one is judged when the next generation has joined (``judged``).
    """
    here = [ctx.view.jobs[number] for number in ctx.fleet.held[node]]
    suspects = [job for job in here if _started(ctx, job, at_ns)]
    for job in suspects:
        if not job.agent_ends:
            job.agent_ends_step = job.step
        end = (job.generation, node)
        again = end in job.agent_ends or any(each[0] != end[0] for each in job.agent_ends)
        job.agent_ends = (*job.agent_ends, end)
        if again and not _may_have_stepped(job):
            _quarantine(ctx, job)
    return bool(suspects)


def judged(ctx: Context, fact: GangJoined) -> bool:
    """A generation has joined, and with it what the last one did. Whether the job is quarantined.

    Nothing was started so far that could end the agents of this one.
    """
    job = ctx.live(fact.job, fact.generation)
    if job is None or not job.agent_ends:
        return False
    if max(job.step, fact.newest) > job.agent_ends_step:
        job.agent_ends = ()  # it made steps: its start ends no agents
    elif len(dict.fromkeys(generation for generation, _ in job.agent_ends)) > 1:
        _quarantine(ctx, job)
        return True
    return False


def _may_have_stepped(job: ClusterJob) -> bool:
    return job.spec.reports_steps and gang_of(job).phase == "running"


def _started(ctx: Context, job: ClusterJob, at_ns: int) -> bool:
    """Whether a gang had just been ordered at a time, and has made no step since."""
    gang, account = gang_of(job), ctx.ledger.accounts[job.id]
    if gang.phase not in ("joining", "restoring", "running") or gang.ending is not None:
        return False
    if gang.phase == "running" and account.step > gang.restored:
        return False
    within = ctx.policy.recovery.agent_end_ns
    if gang.phase == "running" and not job.spec.reports_steps:
        within = min(within, PROGRAM_NS)
    return 0 <= at_ns - gang.since_ns <= within


def _quarantine(ctx: Context, job: ClusterJob) -> None:
    names = dict.fromkeys(ctx.fleet.nodes[node].name for _, node in job.agent_ends)
    why = reason("ends_agents", nodes=", ".join(names))
    job.held, job.operator_hold, job.agent_ends = True, why, ()
    ctx.notify(why, job=job.id, level="error")
    leave(ctx, job, JobState.PENDING, why, keep_memory=True)
    if not job.array_parent:
        return
    for other in dependencies.members(ctx, job.array_parent):
        if other.state == JobState.PENDING and other.operator_hold is None:
            other.held = True
            other.operator_hold = reason("sibling_ends_agents", job=job.id)
            if other.id in ctx.view.pending:
                keep_out(ctx, other)
