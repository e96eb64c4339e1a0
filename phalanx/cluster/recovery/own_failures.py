"""Failures that are the job's own: counted, delayed, and the job given up when there are too many.

What comes from outside (a signal, a lost node, a killed keeper, a lost peer) never counts, and is
recovered from at once, but for one that is killed again and again before it has made any progress,
which waits a little. Committed progress clears the count, and so does a long healthy time.
"""

from __future__ import annotations

from typing import NamedTuple

from phalanx.cluster.causes import Cause
from phalanx.cluster.context import Context
from phalanx.cluster.gang.phases import gang_of
from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.jobs.leave_cause import LeaveCause
from phalanx.cluster.jobs.measured import reports_steps
from phalanx.cluster.reasons import Code, Reason, reason
from phalanx.cluster.units import SECOND_NS

EVIDENCE_KEPT = 5
# Not the job's own, but nothing can be done without it.
STORAGE = (Cause.DISK_FULL, Cause.STORAGE)
SKEW_STEPS = 1  # that ranks may be apart: two failures of one step can be reported so far apart
KILLS_AT_ONCE = 8  # in a row without progress, that are recovered from at once
KILLED_SOUND_NS = 60 * SECOND_NS  # a gang that ran so long was not killed at its start
LONGEST_BREATH_NS = 30 * SECOND_NS
ERROR_CHARS = 200  # of an error that are compared: later ones name addresses and times


class GivenUp(Code):
    """Why a job ends for failures of its own."""

    CANNOT_RUN = "cannot_run"
    NO_FORMATION = "no_formation"
    SAME_STEP = "same_step"
    SAME_ERROR = "same_error"
    RETRIES = "retries"


class ReportedFailure(NamedTuple):
    """One failure as it is told: how, by which rank and at which step."""

    cause: str
    detail: str
    rank: int = -1
    step: int = -1
    waits: bool = True  # before it is tried again, where it comes again without progress
    alike: str = ""  # what failures of its kind have in common; "": their words

    @property
    def error(self) -> str:
        """What is compared with the next failure's."""
        return f"{self.cause}: {self.alike or self.detail}"[:ERROR_CHARS]


def own_failure(ctx: Context, job: ClusterJob, failure: ReportedFailure) -> Reason | None:
    """Counts a failure, unless it is not the job's own. The reason if it was one too many.

    Otherwise the gang may have to wait before it forms again: ``gang.retry_ns``.
    """
    cause, gang = Cause.of(failure.cause), gang_of(job)
    if gang.phase == "settling" and gang.cause != Cause.LOST_PEER:
        return None  # one incident, however many workers it took
    if cause.domain == "hardware" or cause.node == "replace" or failure.cause == Cause.LOST_PEER:
        return None
    step_reached = max(ctx.ledger.accounts[job.id].step, failure.step)
    sentence = failure.cause + (
        f" at step {step_reached}" if step_reached or reports_steps(job) else ""
    )
    sentence += f": {failure.detail}" if failure.detail else ""
    job.evidence = (*job.evidence[1 - EVIDENCE_KEPT :], sentence)
    if not cause.blames_job:
        _pause_between_kills(ctx, job)
        return None
    storage = failure.cause in STORAGE or (
        # What could be started before, and cannot now, is where its files should be.
        failure.cause == Cause.CONFIGURATION and job.generation > 1 and gang.phase == "running"
    )
    if gang.ending is not None and not storage:
        return None  # it is about to leave, and forms only to save what it has
    if gang.phase == "restoring" and gang.source == "remote" and ctx.storage_away:
        return None  # nobody could have restored it
    clear_if_sound(ctx, job, failure.cause)
    if storage:
        job.storage_failures += 1
        wait = _disk_full if failure.cause == Cause.DISK_FULL else _storage_away
        return wait(ctx, job, step_reached, failure.detail or sentence)
    if cause.domain == "software" and gang.phase in ("joining", "restoring"):
        # The step was not even tried: whatever disturbs the formation may pass.
        job.failed_formations += 1
    else:
        _count(ctx, job, failure, step_reached)
    why = _too_many(ctx, job, failure, sentence)
    if why is None and failure.waits:
        _back_off(ctx, job, sentence)
    return why


def progressed(ctx: Context, job: ClusterJob) -> None:
    """Steps may have become safe since the job failed: then what was before counts no more."""
    secured = _secured(ctx, job)
    if secured > job.failed_from:
        job.failed_from = secured
        job.retries_used = job.failed_formations = job.storage_failures = 0
    if job.failures_there and secured > job.failed_step:  # made again, they are no progress there
        job.failures_there, job.failed_step = 0, -1


def restored(ctx: Context, job: ClusterJob) -> None:
    """A gang runs again: what it restored tells whether steps became safe before it failed.

    Reports are seconds old when a worker dies; the keepers know.
    """
    step = gang_of(job).restored
    if step > job.failed_from:
        job.retries_used = min(job.retries_used, 1)
    job.failed_from = step
    job.failed_formations = 0


def _secured(ctx: Context, job: ClusterJob) -> int:
    """The newest step that a failure now would not cost."""
    kept = ctx.policy.recovery.peer_memory and job.spec.expected.snapshot_steps > 0
    return max(job.committed if kept else 0, job.durable)


def clear_if_sound(ctx: Context, job: ClusterJob, cause: str) -> None:
    """A gang that ran well for long enough has used none of its retries; an interval ends, too."""
    policy, gang = ctx.policy.recovery, gang_of(job)
    ran_ns = ctx.now_ns - gang.since_ns if gang.phase in ("running", "draining") else 0
    if ran_ns >= policy.healthy_ns and cause != Cause.HANG:
        job.retries_used = 0
        if not job.step:  # a program that tells no steps has no other progress
            job.failures_there, job.failed_step = 0, -1
    if ctx.now_ns - job.retries_since_ns > policy.retry_interval_ns:
        job.retries_used = 0


def _count(ctx: Context, job: ClusterJob, failure: ReportedFailure, step: int) -> None:
    alike = failure.error == job.failed_error or 0 <= failure.rank == job.failed_rank
    there = job.failed_step >= 0 and abs(step - job.failed_step) <= SKEW_STEPS
    again = there and alike and job.failures_there > 0
    job.failures_there = job.failures_there + 1 if again else 1
    job.failed_step = job.failed_step if again else step
    job.failed_rank, job.failed_error = failure.rank, failure.error
    job.failed_formations = 0
    if not job.retries_used:
        job.retries_since_ns = ctx.now_ns
    job.retries_used += 1


def _too_many(
    ctx: Context, job: ClusterJob, failure: ReportedFailure, sentence: str
) -> Reason | None:
    policy = ctx.policy.recovery
    if failure.cause == Cause.CONFIGURATION and job.generation <= 1:
        # Later a single node may differ from those that it ran on.
        return GivenUp.CANNOT_RUN.because(evidence=failure.detail or sentence)
    if job.failed_formations >= policy.failed_formations:
        return GivenUp.NO_FORMATION.because(times=job.failed_formations, evidence=sentence)
    if job.failures_there >= policy.same_step_failures:
        times = job.failures_there
        if not reports_steps(job):
            return GivenUp.SAME_ERROR.because(times=times, evidence=sentence)
        return GivenUp.SAME_STEP.because(step=job.failed_step, times=times, evidence=sentence)
    if job.retries_used > job.spec.retries:
        minutes = policy.retry_interval_ns // (60 * SECOND_NS)
        return GivenUp.RETRIES.because(retries=job.spec.retries, minutes=minutes, evidence=sentence)
    return None


def _back_off(ctx: Context, job: ClusterJob, sentence: str) -> None:
    """The first failure is recovered from at once; each further one waits twice as long."""
    times = max(job.retries_used, job.failed_formations)
    wait_ns = back_off_ns(ctx, times)
    if wait_ns:
        gang_of(job).retry_ns = ctx.now_ns + wait_ns
        told = reason("backs_off", times=times, seconds=wait_ns // SECOND_NS, evidence=sentence)
        ctx.notify(told, job=job.id, level="warning")
        job.why = told


def _pause_between_kills(ctx: Context, job: ClusterJob) -> None:
    """Ends from outside never end a job; without progress it takes a breath after some of them."""
    gang, secured = gang_of(job), _secured(ctx, job)
    ran_ns = ctx.now_ns - gang.since_ns if gang.phase in ("running", "draining") else 0
    progress = secured > job.killed_from or ran_ns >= KILLED_SOUND_NS
    job.kills = 1 if progress else job.kills + 1
    job.killed_from = max(job.killed_from, secured)
    if job.kills > KILLS_AT_ONCE:
        wait_ns = min(SECOND_NS << min(job.kills - KILLS_AT_ONCE, 30), LONGEST_BREATH_NS)
        gang.retry_ns = ctx.now_ns + wait_ns
        job.why = reason("killed_again", times=job.kills, seconds=wait_ns // SECOND_NS)
        ctx.notify(job.why, job=job.id, level="warning")


def back_off_ns(ctx: Context, times: int) -> int:
    """How long to wait after so many failures without progress."""
    policy = ctx.policy.recovery
    if times < 2:
        return 0
    return min(policy.back_off_ns << min(times - 2, 30), policy.most_back_off_ns)


def _storage_away(ctx: Context, job: ClusterJob, step: int, sentence: str) -> Reason | None:
    """Its folder cannot be used: tried again soon and then less often, for it may come back."""
    policy, times = ctx.policy.recovery, job.storage_failures
    if times >= policy.storage_tries:
        steps = max(0, job.committed - job.durable)
        failed = LeaveCause.STORAGE_FAILED_WITH_LOSS if steps else LeaveCause.STORAGE_FAILED
        return failed.because(times=times, steps=steps, durable=job.durable, evidence=sentence)
    wait_ns = min(policy.storage_retry_ns << min(times - 1, 30), policy.most_back_off_ns)
    gang_of(job).retry_ns = ctx.now_ns + wait_ns
    seconds, tries = wait_ns // SECOND_NS, policy.storage_tries
    waits = reason("storage_wait", seconds=seconds, times=times, tries=tries, evidence=sentence)
    ctx.notify(waits, job=job.id, level="error")
    job.why = waits
    return None


def _disk_full(ctx: Context, job: ClusterJob, step: int, _words: str) -> Reason | None:
    """A checkpoint found no room: memory holds it until there is some, or nobody makes any."""
    policy, times = ctx.policy.recovery, job.storage_failures
    facts: dict[str, int | str] = {"step": step, "steps": step - job.durable, "times": times}
    if times >= policy.room_tries:
        return LeaveCause.NO_ROOM_TO_SAVE.because(durable=job.durable, **facts)
    wait_ns = policy.room_retry_ns * times
    gang_of(job).retry_ns = ctx.now_ns + wait_ns
    seconds = wait_ns // SECOND_NS
    waits = reason("room_wait", seconds=seconds, tries=policy.room_tries, **facts)
    ctx.notify(waits, job=job.id, level="error")
    job.why = waits
    return None
