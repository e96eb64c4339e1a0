"""Programs that may still run: the next generation starts when the last is known to have ended.

Our trainer is fenced by its generation: what an older one writes counts for nothing. A program's
rank that lives on beside its replacement writes the same files. So every node that a program
leaves is asked to say when nothing of it runs there any more (``ProgramEnded``). One that does not
answer ends its programs when the server has not answered it for ``program_lease_ns``; a little
later, counted from its last word, others may start them.
"""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.cluster.context import Context
from phalanx.cluster.gang.phases import gang_of, timeouts_of, token
from phalanx.cluster.jobs.job import ClusterJob, JobSpec
from phalanx.cluster.protocol.events import GangReady
from phalanx.cluster.protocol.messages import ProgramEnded
from phalanx.cluster.protocol.timeouts import derive
from phalanx.cluster.reasons import reason
from phalanx.cluster.units import SECOND_NS


def fence_left(ctx: Context, job: ClusterJob, nodes: Iterable[int]) -> None:
    """A program leaves nodes: those that it was told to run on have to end it.

    One that was lost before is counted from its last word, not from now.
    """
    if job.spec.reports_steps:
        return
    told = set(gang_of(job).keepers)
    for node in nodes:
        if node in told and node not in job.fenced:
            _fence(ctx, job, node, ctx.now_ns)


def fence_lost(ctx: Context, job: ClusterJob, node: int, heard_ns: int) -> None:
    """A node of a job is silent; it was last heard at this time."""
    if job.gang is not None and (node in job.gang.keepers or node in job.fenced):
        _fence(ctx, job, node, min(heard_ns, ctx.now_ns) if heard_ns >= 0 else ctx.now_ns)


def fence_found(ctx: Context, job: ClusterJob, node: int) -> None:
    """A node says that it runs what it should have ended, and ends it only now."""
    _fence(ctx, job, node, ctx.now_ns)


def _fence(ctx: Context, job: ClusterJob, node: int, heard_ns: int) -> None:
    if not job.spec.reports_steps:
        _, until_ns = job.fenced.get(node, (0, 0))
        until_ns = max(until_ns, heard_ns + timeouts_of(ctx, job).silent_ns)
        job.fenced[node] = (job.generation, until_ns)


def renew_all(ctx: Context) -> None:
    """A controller takes over: while none ran, agents let their programs run on."""
    for job in ctx.view.jobs.values():
        if job.fenced and (job.gang is None or job.gang.phase != "running"):
            for node in job.fenced:
                _fence(ctx, job, node, ctx.now_ns)


def predecessor(ctx: Context, spec: JobSpec) -> int:
    """A program is submitted again: what has just ended under its name may not be over yet.

    The number of that job; 0: there is none. Looked for once, however many jobs are submitted.
    """
    if spec.reports_steps:
        return 0
    since_ns = ctx.now_ns - derive(ctx.policy.timeouts, spec.expected).silent_ns
    for number in reversed(ctx.ended):
        other = ctx.view.jobs[number]
        if other.ended_ns < since_ns:
            return 0
        if other.fenced and (other.spec.user, other.spec.name) == (spec.user, spec.name):
            return number
    return 0


def over_ns(ctx: Context, job: ClusterJob) -> int:
    """When nothing of a program can run any more that ran before; 0: it is known that none does."""
    before = ctx.view.jobs.get(job.follows) if job.follows else None
    fences = (*job.fenced.values(), *(before.fenced.values() if before is not None else ()))
    return max((until_ns for _, until_ns in fences), default=0)


def waits_for_fence(ctx: Context, job: ClusterJob, step: int) -> bool:
    """Whether a gang that is ready has to wait; it is looked at again when the time has come."""
    left_ns = over_ns(ctx, job) - ctx.now_ns
    if left_ns <= 0:
        job.fenced, job.follows = {}, 0
        return False
    gang = gang_of(job)
    if gang.ready_step < 0:
        seconds = -(-left_ns // SECOND_NS)
        ctx.notify(reason("fenced", seconds=seconds), job=job.id, level="info")
    gang.ready_step = step
    ctx.wake(ctx.now_ns + left_ns, "fence", job.id, token(job))
    return True


def confirmed(ctx: Context, fact: ProgramEnded) -> list[GangReady]:
    """A node says that a program has ended there; gangs that waited for it are ready."""
    job = ctx.view.jobs.get(fact.job)
    if job is None:
        return []
    generation, _ = job.fenced.get(fact.node, (0, 0))
    if not generation or fact.generation < generation:
        return []  # of an earlier end: the program has run there since
    del job.fenced[fact.node]
    if job.fenced:
        return []  # of other nodes
    if not job.ended:
        return ready_again(job)
    active = (ctx.view.jobs[number] for number in ctx.view.active)
    return [ready for each in active if each.follows == job.id for ready in ready_again(each)]


def ready_again(job: ClusterJob) -> list[GangReady]:
    """What a gang that waits had said before."""
    step = job.gang.ready_step if job.gang is not None else -1
    return [GangReady(job=job.id, generation=job.generation, step=step)] if step >= 0 else []
