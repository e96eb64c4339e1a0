"""A gang's formation as the controller sees it: form, joined, restore, ready, drain.

Every formation has a new generation. The nodes that kept snapshots of the last running generation
(``gang.keepers``) stay the source of truth until the next one is ready.
"""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.context import Context
from phalanx.cluster.forecast.horizon import leave_ns
from phalanx.cluster.jobs.job import SECOND_NS, SKIPS_KEPT, Gang, Job, JobState, Phase
from phalanx.cluster.protocol.commands import Drain, Form, Go, Restore, Stop
from phalanx.cluster.protocol.events import (
    GangDrained,
    GangJoined,
    GangReady,
    Progress,
    RestoreFailed,
)
from phalanx.cluster.protocol.messages import Source
from phalanx.cluster.protocol.timeouts import Timeouts, derive
from phalanx.cluster.reasons import Reason, reason, sentences
from phalanx.cluster.recovery.layout import buddy_shift
from phalanx.cluster.recovery.losses import in_memory, tell_restored

UNSAVED_PERIODS = 3  # without a durable checkpoint that was due: something is wrong
UNSAVED_NS = 60 * SECOND_NS

sentences(
    {
        "restore": "all slots have joined; step {step} comes from {source}",
        "fresh": "all slots have joined; there is nothing to restore",
        "from_nothing": "nothing is left to restore: it begins again, after {steps} steps",
        "go": "all ranks have restored step {step}",
        "recovered": "goes on from step {step}: {rung} after {cause} on {node}",
        "recovered_with_loss": "goes on from step {step}, {lost} committed steps back: {rung} "
        "after {cause} on {node}",
        "drain": "it must leave: {why}",
        "unsaved": "no durable checkpoint since step {durable}, though one is due every {every} "
        "steps: {steps} steps are only in the memory of its nodes (`phalanx logs` says why)",
        "bare": "it leaves before a checkpoint was made: it begins anew, unless it keeps its own",
        "stop": "it has no business there any more",
    }
)


def timeouts_of(ctx: Context, job: Job) -> Timeouts:
    """The deadlines of a job, from its measured step time where there is one."""
    expected = job.spec.expected
    found = derive(ctx.policy.timeouts, expected, job.step_ns or expected.step_ns)
    if job.step_ns:
        return found
    # Nobody knows yet what a step takes: the first one has as long as it may without a hang.
    return structs.replace(found, drain_ns=max(found.drain_ns, found.hang_ns))


def last_call_ns(ctx: Context, job: Job, deadline_ns: int) -> int:
    """When a job must begin to leave so that it is gone, with its state safe, by a deadline.

    Twice the time that it should take: storage may be slow, or the gang just form again.
    """
    needs_ns = max(leave_ns(ctx.view, job), timeouts_of(ctx, job).drain_ns)
    return deadline_ns - 2 * needs_ns


def gang_of(job: Job) -> Gang:
    """The gang of a job that has one."""
    assert job.gang is not None
    return job.gang


def enter(ctx: Context, job: Job, phase: Phase, limit_ns: int, attempts: int = 0) -> int:
    """Moves a gang to a phase that must end within a time; returns the deadline.

    Whoever gathers the answers says at the deadline who is missing; should nobody say it, the core
    wakes up by itself a little later.
    """
    gang = gang_of(job)
    gang.phase = phase
    gang.since_ns = ctx.now_ns
    gang.attempts = attempts
    deadline = ctx.now_ns + limit_ns
    ctx.wake(deadline + ctx.policy.timeouts.round_trip_ns, "phase", job.id, token(job))
    return deadline


def token(job: Job) -> int:
    """Tells whether a timer of a gang still speaks of the same generation, phase and attempt."""
    phases = ("settling", "joining", "restoring", "running", "draining")
    gang = gang_of(job)
    return job.generation * 64 + phases.index(gang.phase) * 8 + min(gang.attempts, 7)


def form(ctx: Context, job: Job, why: Reason, *, cold: bool = True) -> None:
    """Orders the next generation onto the job's placement.

    ``cold``: workers are started on nodes that have none standing by, which takes longer.
    """
    gang, placement = gang_of(job), job.placement
    assert placement is not None
    job.generation += 1
    job.state, job.why = "forming", why
    ctx.note_wants(job)
    gang.broken, gang.retry_ns = {}, 0
    limits = timeouts_of(ctx, job)
    limit_ns = limits.join_ns if cold else limits.rejoin_ns
    gang.deadline_ns = enter(ctx, job, "joining", limit_ns)
    ctx.emit(placement.nodes + placement.spares, form_order(ctx, job))


def form_order(ctx: Context, job: Job) -> Form:
    """The order to join the current generation."""
    gang, placement = gang_of(job), job.placement
    assert placement is not None
    return Form(
        reason=job.why,
        job=job.id,
        generation=job.generation,
        nodes=placement.nodes,
        gpus=placement.gpus,
        spares=placement.spares,
        replicas=placement.replicas,
        slot_gpus=job.spec.gang.slot_gpus,
        world=job.spec.gang.gpus(placement.replicas),
        store=placement.nodes[0],
        kept_generation=gang.kept_generation,
        kept_nodes=() if gang.keepers == placement.nodes else gang.keepers,
        kept_shift=gang.buddy_shift,
        buddy_shift=buddy_shift(ctx.fleet, placement.nodes, gang.buddy_shift),
        deadline_ns=gang.deadline_ns,
        micro_batches=gang.micro_batches,
        asks_leave=ctx.policy.storage.flushes > 0,
        payload=job.spec.payload,
        user=job.spec.user,
    )


def on_joined(ctx: Context, fact: GangJoined) -> None:
    """Everybody is there: choose what to restore, and from where."""
    job = ctx.live(fact.job, fact.generation)
    if job is None or gang_of(job).phase != "joining":
        return
    gang, placement = gang_of(job), job.placement
    assert placement is not None
    # Whoever joined speaks for itself: a node that was given up may be back with all it kept.
    if gang.lost:
        for node in sorted(set(gang.lost).intersection(placement.nodes)):
            del gang.lost[node]
    if fact.empty:
        kept = dict.fromkeys(gang.keepers)
        gang.lost.update({node: "empty" for node in fact.empty if node in kept})
    if gang.rollback < 0 or fact.durable <= gang.rollback:
        job.add_durable(fact.durable)
    job.kept_step = max(job.kept_step, fact.newest)
    gang.memory_step = fact.step if fact.step >= 0 and in_memory(gang) else -1
    restore(ctx, job)


def restore(ctx: Context, job: Job) -> None:
    """Orders the restore of the best step that can be had."""
    gang, placement = gang_of(job), job.placement
    assert placement is not None
    gang.restored, gang.source = choose_source(ctx, job, gang.memory_step)
    gang.only_saves = gang.ending is not None
    gang.deadline_ns = enter(ctx, job, "restoring", timeouts_of(ctx, job).restore_ns)
    ctx.emit(placement.nodes, restore_order(job))


def restore_order(job: Job) -> Restore:
    """The order to load what was chosen."""
    gang = gang_of(job)
    told = reason("restore", step=gang.restored, source=gang.source)
    return Restore(
        reason=told if gang.restored else reason("fresh"),
        job=job.id,
        generation=job.generation,
        step=gang.restored,
        source=gang.source,
        skipped=job.skipped,
        skip_step=gang.skip_step,
        told=_told(job),
        saves=gang.only_saves,
        deadline_ns=gang.deadline_ns,
    )


def _told(job: Job) -> tuple[int, int]:
    """A step and a block that replicas disagreed on: whoever makes it again tells what it gives."""
    dispute, placement = job.dispute, job.placement
    if dispute is None or placement is None or dispute.replicas != placement.replicas:
        return (0, 0)
    return dispute.step, dispute.block


def outstanding(ctx: Context, job: Job) -> list[Form | Restore | Drain]:
    """The orders that a gang has not carried out yet: what is sent again when in doubt."""
    gang = gang_of(job)
    if gang.phase == "joining":
        return [form_order(ctx, job)]
    if gang.phase == "restoring":
        return [form_order(ctx, job), restore_order(job)]
    return [drain_order(job)] if gang.phase == "draining" else []


def choose_source(ctx: Context, job: Job, memory_step: int) -> tuple[int, Source]:
    """The step to go on from and where it is: memory, local disk, remote storage, or nothing.

    An older step in memory is taken where redoing the difference costs less than reading remotely.
    """
    gang, expected = gang_of(job), job.spec.expected
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


def _on_disks(job: Job, step: int) -> bool:
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
    lost = tell_restored(ctx, job, fact.step)
    if gang.source == "none" and job.step and not lost:
        ctx.notify(reason("from_nothing", steps=job.step), job=job.id, level="error")
    silent = not job.spec.reports_steps and not job.step_ns
    ctx.ledger.ready(job.id, fact.step, unreported=silent)
    gang.phase, gang.since_ns, gang.attempts = "running", ctx.now_ns, 0
    same = gang.keepers == placement.nodes
    gang.kept_from = min(gang.kept_from, fact.step) if same else fact.step
    gang.keepers, gang.kept_generation = placement.nodes, job.generation
    gang.buddy_shift = buddy_shift(ctx.fleet, placement.nodes, gang.buddy_shift)
    left = tuple(node for node in gang.leftover if node not in placement.nodes)
    stop_on(ctx, job, left, keep_snapshots=False)
    gang.leftover = ()
    if fact.skipped[1] > fact.skipped[0]:
        job.skipped = (*job.skipped[1 - SKIPS_KEPT :], fact.skipped)
    gang.lost, gang.rollback, gang.skip_step = {}, -1, 0
    gang.refused, gang.refusal = (), ""
    gang.restored = fact.step
    # Checkpoints after this step belong to a branch that is given up now.
    job.durables = [step for step in job.durables if step <= fact.step]
    job.committed = fact.step
    job.step = max(job.step, fact.step)
    job.state = "running"
    if job.why.code in ("recover", "bear"):
        # What was expected of the way out counts no more: the ledger has what it really cost.
        told = {name: job.why.facts[name] for name in ("rung", "cause", "node")}
        if lost:
            job.why = reason("recovered_with_loss", step=fact.step, lost=lost, **told)
        else:
            job.why = reason("recovered", step=fact.step, **told)
    ctx.emit(placement.nodes, go_order(job))
    return True


def go_order(job: Job) -> Go:
    """The order to make steps."""
    told = reason("go", step=gang_of(job).restored)
    return Go(reason=told, job=job.id, generation=job.generation)


def on_progress(ctx: Context, fact: Progress) -> Job | None:
    """Takes over how far a gang is; a fact about an older generation only settles the ledger."""
    job = ctx.view.jobs.get(fact.job)
    if job is None or job.gang is None or fact.generation > job.generation:
        return None
    gang = job.gang
    current = fact.generation == job.generation and gang.phase in ("running", "draining")
    if not current and ctx.ledger.accounts[job.id].open is None:
        if fact.generation == job.generation:  # whoever joins says how far the last one came
            _learn(job, fact)
        return None
    steps = fact.step - ctx.ledger.accounts[job.id].step
    passed = fact.at_ns - ctx.ledger.accounts[job.id].settled_ns
    ctx.ledger.progress(job, fact)
    _learn(job, fact)
    if current and steps > 0 and job.agent_ends:
        job.agent_ends = ()  # its start ends no agents
    if current and steps > 0 and passed > 0:
        if ctx.ledger.accounts[job.id].step - steps == gang.restored:
            job.first_step_ns = max(job.first_step_ns, passed)
        measured = passed // steps
        job.step_ns = measured if not job.step_ns else (3 * job.step_ns + measured) // 4
    if current:
        _tell_unsaved(ctx, job)
    return job


def _learn(job: Job, fact: Progress) -> None:
    """How far a gang is, as all of its nodes say."""
    job.step = max(job.step, fact.step)
    job.committed = max(job.committed, fact.committed)
    taken_back = 0 <= gang_of(job).rollback < fact.durable
    if fact.durable <= fact.step and not taken_back:
        job.add_durable(fact.durable)


def _tell_unsaved(ctx: Context, job: Job) -> None:
    """Durable checkpoints that fail do not stop a job: that they are missing is said, once each."""
    every, behind = job.spec.expected.checkpoint_steps, job.step - job.durable
    if not every or behind < UNSAVED_PERIODS * every or job.unsaved_since == job.durable:
        return
    if behind * job.step_ns < UNSAVED_NS + job.spec.expected.flush_ns:
        return  # short steps: the last one may still be on its way
    job.unsaved_since = job.durable
    told = reason("unsaved", steps=behind, durable=job.durable, every=every)
    ctx.notify(told, job=job.id, level="error")


def drain(ctx: Context, job: Job, limit_ns: int, ending: JobState, why: Reason) -> None:
    """Asks a running gang to stop with its state safe; what it becomes then is ``ending``."""
    gang, placement = gang_of(job), job.placement
    assert placement is not None
    gang.ending, gang.ending_why = ending, why
    job.state, job.why = "draining", why
    gang.deadline_ns = enter(ctx, job, "draining", limit_ns)
    ctx.emit(placement.nodes, drain_order(job))


def hurry(ctx: Context, job: Job, limit_ns: int) -> None:
    """A gang that saves its state to leave has less time for that than it was told."""
    gang, placement = gang_of(job), job.placement
    assert placement is not None
    gang.deadline_ns = enter(ctx, job, "draining", limit_ns, gang.attempts)
    ctx.emit(placement.nodes, drain_order(job))


def drain_order(job: Job) -> Drain:
    """The order to make the state safe and leave."""
    gang = gang_of(job)
    return Drain(
        reason=reason("drain", why=str(gang.ending_why)),
        job=job.id,
        generation=job.generation,
        deadline_ns=gang.deadline_ns,
    )


def on_drained(ctx: Context, fact: GangDrained) -> Job | None:
    """The gang has stopped; the job if it was asked to."""
    job = ctx.live(fact.job, fact.generation)
    if job is None or gang_of(job).ending is None:
        return None
    if fact.durable:
        job.add_durable(fact.step)
    tell_bare(ctx, job)
    return job


def tell_bare(ctx: Context, job: Job) -> None:
    """A job leaves, to come back, and nothing of it is safe anywhere."""
    bare = not job.durable and not job.committed
    if bare and gang_of(job).ending == "pending":
        ctx.notify(reason("bare"), job=job.id, level="warning")


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


def stop_on(ctx: Context, job: Job, nodes: tuple[int, ...], *, keep_snapshots: bool) -> None:
    """Ends whatever runs of a job on some nodes."""
    if keep_snapshots and job.gang is not None:
        job.gang.leftover = tuple(dict.fromkeys((*job.gang.leftover, *nodes)))
    if nodes:
        why = reason("stop")
        order = Stop(
            reason=why, job=job.id, generation=job.generation, keep_snapshots=keep_snapshots
        )
        ctx.emit(nodes, order)
