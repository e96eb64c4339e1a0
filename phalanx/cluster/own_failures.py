"""Failures that are no part's fault: counted, and the job stopped when there are too many."""

from __future__ import annotations

from phalanx.cluster.causes import cause_of
from phalanx.cluster.context import Context
from phalanx.cluster.gangs import gang_of
from phalanx.cluster.job import SECOND_NS, Job
from phalanx.cluster.lifecycle import leave
from phalanx.cluster.reasons import Reason, reason, sentences

EVIDENCE_KEPT = 5

sentences(
    {
        "same_step": "failed {times} times in a row at about step {step}; last: {evidence}",
        "no_formation": "could not form {times} times in a row; last: {evidence}",
        "cannot_run": "{evidence}; it is not tried again",
        "retries": "failed more often than its {retries} retries; last: {evidence}",
        "room_wait": "there is no room for the checkpoint of step {step}: {steps} steps are only "
        "in the memory of its nodes. Make room: it is written again in {seconds} s "
        "(attempt {times} of {tries} failed)",
        "room_never": "no room for the checkpoint of step {step} in {times} attempts: its last "
        "{steps} steps were only in memory and are LOST; its newest checkpoint is step {durable}",
    }
)


def own_failure(ctx: Context, job: Job, cause: str, detail: str, step: int = 0) -> bool:
    """Counts a failure that is not a part's fault. True when it was one too many.

    ``step``: that was reached, where it is known better than from the last report.
    """
    domain = cause_of(cause).domain
    if domain == "hardware" or cause_of(cause).node == "replace" or cause == "lost_peer":
        return False
    gang = gang_of(job)
    if gang.phase == "settling" and gang.cause != "lost_peer":
        return False  # one incident, however many workers it took
    here = max(ctx.ledger.accounts[job.id].step, step)
    words = f"{cause} at step {here}" + (f": {detail}" if detail else "")
    job.evidence = (*job.evidence[1 - EVIDENCE_KEPT :], words)
    if gang.phase == "restoring" and gang.source == "remote" and ctx.storage_away:
        return False  # nobody could have restored it
    if domain == "software" and gang.phase in ("joining", "restoring"):
        # The step was not even tried: whatever disturbs the formation may pass.
        job.failed_formations += 1
    else:
        again = job.failed_step >= 0 and abs(here - job.failed_step) <= _unseen_steps(ctx, job)
        job.failures_there = job.failures_there + 1 if again else 1
        job.failed_step = job.failed_step if again else here
        job.failed_formations = 0
    if domain == "user":
        job.retries_used += 1
    why: Reason | None = None
    if cause == "configuration" and job.generation <= 1:
        # Later a single node may differ from those that it ran on.
        why = reason("cannot_run", evidence=detail or words)
    elif job.failed_formations >= ctx.policy.recovery.failed_formations:
        why = reason("no_formation", times=job.failed_formations, evidence=words)
    elif cause == "disk_full":
        why = _no_room(ctx, job, here)
    elif job.failures_there >= ctx.policy.recovery.same_step_failures:
        why = reason("same_step", step=here, times=job.failures_there, evidence=words)
    elif job.retries_used > job.spec.retries:
        why = reason("retries", retries=job.spec.retries, evidence=words)
    if why is None:
        return False
    leave(ctx, job, "failed", why)
    return True


def _unseen_steps(ctx: Context, job: Job) -> int:
    """Steps that a report may be behind: two failures of one step can be so far apart."""
    step_ns = job.step_ns or job.spec.expected.step_ns
    return max(1, 2 * ctx.policy.timeouts.heartbeat_ns // max(1, step_ns))


def _no_room(ctx: Context, job: Job, step: int) -> Reason | None:
    """A checkpoint found no room: memory holds it until there is some, or nobody makes any."""
    policy, times = ctx.policy.recovery, job.failures_there
    told: dict[str, int | str] = {"step": step, "steps": step - job.durable, "times": times}
    if times >= policy.room_tries:
        return reason("room_never", durable=job.durable, **told)
    seconds = policy.room_retry_ns * times // SECOND_NS
    waits = reason("room_wait", seconds=seconds, tries=policy.room_tries, **told)
    ctx.notify(waits, job=job.id, level="error")
    job.why = waits
    return None
