"""Leave to write durable checkpoints, so that jobs do not flush at the same time.

Workers ask before they flush; grants are given in the order of asking, each with a rate and an end.
"""

from __future__ import annotations

from phalanx.cluster.context import Context
from phalanx.cluster.gang.phases import gang_of
from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.protocol.commands import Flush
from phalanx.cluster.protocol.events import StorageSlow
from phalanx.cluster.protocol.messages import FlushWanted
from phalanx.cluster.reasons import reason
from phalanx.cluster.units import HOUR_NS, MILLION, SECOND_NS

SLOW_TIMES = 3  # as long as a job's checkpoints usually take is slow storage
LEAST_SLOW_NS = 5 * SECOND_NS  # what is over sooner is not
LONGEST_FLUSH_NS = 24 * HOUR_NS  # whoever needs longer asks again


def on_wanted(ctx: Context, fact: FlushWanted) -> None:
    """A gang wants to write a checkpoint."""
    job = ctx.live(fact.job, fact.generation)
    if job is not None and job.id not in ctx.flush.writing:
        ctx.flush.waiting[job.id] = None
        grant(ctx)


def written(ctx: Context, job: int) -> None:
    """A checkpoint of a job became durable: its turn is over."""
    if ctx.flush.writing.pop(job, None) is not None:
        grant(ctx)


def on_slow(ctx: Context, fact: StorageSlow) -> None:
    """Storage became slower or faster: later grants are given accordingly."""
    was_away = ctx.storage_away
    ctx.flush.bytes_per_second = fact.bytes_per_second
    for number, until in list(ctx.flush.writing.items()) if not ctx.storage_away else ():
        end_ns = _end_ns(ctx, ctx.view.jobs[number])
        if end_ns < until:  # whoever began at another rate keeps nobody waiting for that long
            _allow(ctx, number, end_ns)
    if ctx.storage_away and not was_away:
        ctx.notify(reason("storage_down"), level="warning")
    elif was_away and not ctx.storage_away:
        ctx.notify(reason("storage_back"))
    grant(ctx)


def flushed(ctx: Context, job: ClusterJob, flush_ns: int) -> None:
    """A checkpoint took so long to write: whoever wrote it sees how fast the storage is."""
    usual_ns, allowed_rate = job.usual_flush_ns, ctx.flush.bytes_per_second
    if not usual_ns or flush_ns <= max(SLOW_TIMES * usual_ns, LEAST_SLOW_NS):
        job.usual_flush_ns = (3 * usual_ns + flush_ns) // 4 if usual_ns else flush_ns
        if allowed_rate > 0:
            ctx.notify(reason("storage_fast"), job=job.id)
            on_slow(ctx, StorageSlow(bytes_per_second=-1))
        return
    written = job.spec.expected.checkpoint_bytes * SECOND_NS // flush_ns
    seen = written * max(1, len(ctx.flush.writing))
    if 0 < allowed_rate <= 2 * seen:  # as fast as it might: the next one tries what storage gives
        on_slow(ctx, StorageSlow(bytes_per_second=-1))
        return
    why = reason("storage_slow", seconds=flush_ns // SECOND_NS, usual=usual_ns // SECOND_NS)
    ctx.notify(why, job=job.id, level="warning")
    if seen:
        on_slow(ctx, StorageSlow(bytes_per_second=seen))


def left(ctx: Context, job: int) -> None:
    """A job's workers are gone, or begin anew: its turn goes to the next."""
    ctx.flush.waiting.pop(job, None)
    if ctx.flush.writing.pop(job, None) is not None:
        grant(ctx)


def expired(ctx: Context, job: int) -> None:
    """A grant has run out: whoever had it must ask again."""
    if ctx.flush.writing.get(job, ctx.now_ns + 1) <= ctx.now_ns:
        del ctx.flush.writing[job]
        grant(ctx)


def grant(ctx: Context) -> None:
    """Gives leave to those who wait, as far as storage carries them."""
    policy, state = ctx.policy.storage, ctx.flush
    if ctx.storage_away:
        return
    for number in list(state.waiting):
        if policy.flushes and len(state.writing) >= policy.flushes:
            return
        del state.waiting[number]
        job = ctx.view.jobs[number]
        if job.gang is None or gang_of(job).phase not in ("running", "draining"):
            continue
        assert job.placement is not None
        until = _end_ns(ctx, job)
        _allow(ctx, number, until)
        ctx.emit(
            job.placement.nodes,
            Flush(
                reason=reason("flush", writing=len(state.writing), most=policy.flushes),
                job=number,
                generation=job.generation,
                bytes_per_second=_share(ctx),
                until_ns=until,
            ),
        )


def _share(ctx: Context) -> int:
    """Bytes a second for each job that writes; 0: not limited."""
    policy, told = ctx.policy.storage, ctx.flush.bytes_per_second
    total = policy.bytes_per_second if told < 0 else told
    return max(1, total // max(1, policy.flushes)) if total else 0


def _end_ns(ctx: Context, job: ClusterJob) -> int:
    """When a checkpoint that a job begins to write now will be written at the latest."""
    expected, timeouts, share = job.spec.expected, ctx.policy.timeouts, _share(ctx)
    usual = expected.checkpoint_bytes * 10**9 // share if share else expected.checkpoint_ns
    allowed = usual * timeouts.slack_ppm // MILLION + timeouts.least_hang_ns
    return ctx.now_ns + min(allowed, LONGEST_FLUSH_NS)


def _allow(ctx: Context, job: int, until_ns: int) -> None:
    ctx.flush.writing[job] = until_ns
    ctx.wake(until_ns, "flush", job)
