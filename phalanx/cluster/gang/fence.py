"""Programs on lost nodes: the next generation starts when they are known to have ended.

Our trainer is fenced by its generation: what an older one writes counts for nothing. A program's
rank that lives on beside its replacement writes the same files. A node ends its programs when the
server has not answered for ``program_lease_ns``; a little later, counted from its last word, others
may start them.
"""

from __future__ import annotations

from phalanx.cluster.context import Context
from phalanx.cluster.gang.phases import timeouts_of, token
from phalanx.cluster.jobs.job import SECOND_NS, Job
from phalanx.cluster.reasons import reason


def fence(ctx: Context, job: Job, heard_ns: int) -> None:
    """A node with a part of a job is lost, or ends it only now; it was last heard at this time."""
    phase = job.gang.phase if job.gang is not None else "running"
    begins = job.generation == 1 and phase in ("joining", "restoring")
    if job.spec.reports_steps or job.ended or begins:
        return
    heard_ns = min(heard_ns, ctx.now_ns) if heard_ns >= 0 else ctx.now_ns
    job.fenced_ns = max(job.fenced_ns, heard_ns + timeouts_of(ctx, job).silent_ns)


def waits_for_fence(ctx: Context, job: Job) -> bool:
    """Whether a gang that could run has to wait; it is looked at again when the time has come."""
    left_ns = job.fenced_ns - ctx.now_ns
    if left_ns <= 0:
        return False
    seconds = -(-left_ns // SECOND_NS)
    ctx.notify(reason("fenced", seconds=seconds), job=job.id, level="info")
    ctx.wake(job.fenced_ns, "fence", job.id, token(job))
    return True
