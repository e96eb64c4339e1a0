"""How a gang comes to run: form, joined, restore, ready.

Every formation has a new generation. The nodes that kept snapshots of the last running generation
(``gang.keepers``) stay the source of truth until the next one is ready.
"""

from __future__ import annotations

from phalanx.cluster.context import Context
from phalanx.cluster.gang import failure_rates
from phalanx.cluster.gang.fence import fence_left, over_ns, waits_for_fence
from phalanx.cluster.gang.layout import backup_spare, buddy_shift
from phalanx.cluster.gang.losses import in_memory, tell_restored
from phalanx.cluster.gang.orders import form_order, go_order, restore_order, stop_on
from phalanx.cluster.gang.phases import enter, gang_of, timeouts_of
from phalanx.cluster.gang.way_taken import once_it_runs
from phalanx.cluster.jobs import measured
from phalanx.cluster.jobs.job import ClusterJob, JobState
from phalanx.cluster.protocol.events import GangJoined, GangReady
from phalanx.cluster.protocol.messages import RestoreFailed, Source
from phalanx.cluster.reasons import Reason, reason

SKIPS_KEPT = 16  # ranges of samples; older ones are in every checkpoint that is left


def form(ctx: Context, job: ClusterJob, why: Reason, *, cold: bool = True) -> None:
    """Orders the next generation onto the job's placement.

    ``cold``: workers are started on nodes that have none standing by, which takes longer.
    """
    gang, placement = gang_of(job), job.placement
    assert placement is not None
    fence_left(ctx, job, placement.spares)
    job.generation += 1
    job.state, job.why = JobState.FORMING, why
    ctx.note_wants(job)
    gang.broken, gang.retry_ns = {}, 0
    gang.next_backup = backup_spare(job)
    limits = timeouts_of(ctx, job)
    limit_ns = limits.join_ns if cold else limits.rejoin_ns
    gang.deadline_ns = enter(ctx, job, "joining", limit_ns)
    ctx.emit(placement.nodes + placement.spares, form_order(ctx, job))


def on_joined(ctx: Context, fact: GangJoined) -> None:
    """Everybody is there: choose what to restore, and from where."""
    job = ctx.live(fact.job, fact.generation)
    if job is None or gang_of(job).phase != "joining":
        return
    gang, placement = gang_of(job), job.placement
    assert placement is not None
    if job.fenced:  # what ran there has ended: it would not have joined before
        for node in set(job.fenced).intersection(placement.nodes):
            del job.fenced[node]
    # Whoever joined speaks for itself: a node that was given up may be back with all it kept.
    if gang.lost:
        for node in sorted(set(gang.lost).intersection(placement.nodes)):
            del gang.lost[node]
    if fact.empty:
        kept = dict.fromkeys((*gang.keepers, gang.backup))
        gang.lost.update({node: "empty" for node in fact.empty if node in kept})
    if gang.rollback < 0 or fact.durable <= gang.rollback:
        job.add_durable(fact.durable)
    job.kept_step = max(job.kept_step, fact.newest)
    measured.joined(job, gang.cause, ctx.now_ns - gang.since_ns)
    gang.memory_step = fact.step if fact.step >= 0 and in_memory(gang) else -1
    restore(ctx, job)


def restore(ctx: Context, job: ClusterJob) -> None:
    """Orders the restore of the best step that can be had."""
    gang, placement = gang_of(job), job.placement
    assert placement is not None
    gang.restored, gang.source = choose_source(ctx, job, gang.memory_step)
    gang.only_saves = gang.ending is not None
    limit_ns = timeouts_of(ctx, job).restore_ns + max(0, over_ns(ctx, job) - ctx.now_ns)
    gang.deadline_ns = enter(ctx, job, "restoring", limit_ns)
    ctx.emit(placement.nodes, restore_order(job))
    if gang.next_backup >= 0:  # it learns which of its copies the generation goes on from
        ctx.emit((gang.next_backup,), restore_order(job))


def choose_source(ctx: Context, job: ClusterJob, memory_step: int) -> tuple[int, Source]:
    """The step to go on from and where it is: memory, local disk, remote storage, or nothing.

    An older step in memory is taken where redoing the difference costs less than reading remotely.
    """
    gang, expected = gang_of(job), job.expected
    step_ns = job.step_ns or expected.step_ns
    if gang.rollback >= 0 and memory_step > gang.rollback:
        memory_step = -1
    usable = memory_step >= 0 and ctx.policy.recovery.peer_memory and "peer" not in gang.refused
    allowed = [step for step in job.durables if gang.rollback < 0 or step <= gang.rollback]
    durable = allowed[-1] if allowed else 0
    if usable:
        behind = (durable - memory_step) * step_ns
        if behind <= expected.restore_remote_ns - expected.restore_peer_ns:
            return memory_step, "peer" if memory_step else "none"
    if not durable:
        return (memory_step, "peer") if usable and memory_step else (0, "none")
    return durable, "disk" if _on_disks(job, durable) else "remote"


def _on_disks(job: ClusterJob, step: int) -> bool:
    """Whether every node of the new generation wrote its own part of a checkpoint.

    A step that other nodes wrote may lie on these disks too, from a branch that was given up.
    """
    gang = gang_of(job)
    if job.placement is None or gang.lost or not gang.keepers or "disk" in gang.refused:
        return False
    had = dict.fromkeys(gang.keepers)
    return step > gang.kept_from and all(node in had for node in job.placement.nodes)


def on_ready(ctx: Context, fact: GangReady) -> bool:
    """The gang runs. True when it was waited for."""
    job = ctx.live(fact.job, fact.generation)
    if job is None or gang_of(job).phase != "restoring":
        return False
    gang, placement = gang_of(job), job.placement
    assert placement is not None
    waited = gang.ready_step >= 0
    if waits_for_fence(ctx, job, fact.step):
        return False
    gang.ready_step = -1
    if not waited:
        measured.restored(job, gang.source, ctx.now_ns - gang.since_ns)
    lost = tell_restored(ctx, job, fact.step)
    if gang.source == "none" and job.step and not lost:
        ctx.notify(reason("from_nothing", steps=job.step), job=job.id, level="error")
    ctx.ledger.ready(job.id, fact.step, unreported=not measured.reports_steps(job))
    gang.phase, gang.since_ns, gang.attempts = "running", ctx.now_ns, 0
    same = gang.keepers == placement.nodes
    gang.kept_from = min(gang.kept_from, fact.step) if same else fact.step
    gang.keepers, gang.kept_generation = placement.nodes, job.generation
    gang.buddy_shift = buddy_shift(ctx.fleet.columns, placement.nodes, gang.buddy_shift)
    gang.backup = gang.next_backup
    left = tuple(node for node in gang.leftover if node not in placement.nodes)
    stop_on(ctx, job, left, keep_snapshots=False)
    gang.leftover = ()
    if fact.skipped[1] > fact.skipped[0]:
        leave_out(job, *fact.skipped)
    gang.lost, gang.rollback, gang.skip_step = {}, -1, 0
    gang.refused, gang.refusal = (), ""
    gang.restored = fact.step
    # Checkpoints after this step belong to a branch that is given up now.
    job.durables = [step for step in job.durables if step <= fact.step]
    job.committed = fact.step
    job.step = max(job.step, fact.step)
    job.state = JobState.RUNNING
    job.why = once_it_runs(job.why, fact.step, lost, program=not job.spec.reports_steps)
    ctx.emit(placement.nodes, go_order(job))
    failure_rates.begins_to_run(ctx, job, gang)
    return True


def on_restore_failed(ctx: Context, fact: RestoreFailed) -> None:
    """A source was no good: the next one is tried within the same generation."""
    job = ctx.live(fact.job, fact.generation)
    if job is None or gang_of(job).phase != "restoring" or fact.source == "none":
        return
    gang = gang_of(job)
    if fact.source == "remote" and ctx.storage_away:
        return  # the checkpoint may be good: it is tried again when the time for this one is over
    if fact.source == "remote":
        # Never tried again: the checkpoint before it, or a fresh start.
        there = None if fact.there is None else dict.fromkeys(fact.there)
        job.durables = [
            step
            for step in job.durables
            if step != fact.step and (there is None or step > fact.step or step in there)
        ]
    else:
        gang.refused, gang.refusal = (*gang.refused, fact.source), fact.detail
    restore(ctx, job)


def leave_out(job: ClusterJob, first: int, past: int) -> None:
    """A range of samples is never read."""
    kept = job.skipped[1 - SKIPS_KEPT :]
    older = job.skipped[: len(job.skipped) - len(kept)]
    job.skipped_before += sum(end - begin for begin, end in older)
    job.skipped = (*kept, (first, past))
