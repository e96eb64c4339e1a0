"""The orders that a gang's nodes get, made from its state: they can be sent again at any time."""

from __future__ import annotations

from phalanx.cluster.context import Context
from phalanx.cluster.gang.layout import buddy_shift
from phalanx.cluster.gang.phases import gang_of
from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.protocol.commands import ArrayMember, Drain, Form, Go, Restore, Stop
from phalanx.cluster.reasons import reason


def form_order(ctx: Context, job: ClusterJob) -> Form:
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
        kept_backup=gang.backup,
        buddy_shift=buddy_shift(ctx.fleet.columns, placement.nodes, gang.buddy_shift),
        backup=gang.next_backup,
        deadline_ns=gang.deadline_ns,
        micro_batches=gang.micro_batches,
        asks_leave=ctx.policy.storage.flushes > 0,
        payload=job.spec.payload,
        user=job.spec.user,
        array=_member(job),
    )


def _member(job: ClusterJob) -> ArrayMember | None:
    array = job.spec.array
    if array is None:
        return None
    index = array.index(job.array_index)
    return ArrayMember(job=job.array_parent, index=index, count=array.count)


def restore_order(job: ClusterJob) -> Restore:
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


def _told(job: ClusterJob) -> tuple[int, int]:
    """A step and a block that replicas disagreed on: whoever makes it again tells what it gives."""
    dispute, placement = job.dispute, job.placement
    if dispute is None or placement is None or dispute.replicas != placement.replicas:
        return (0, 0)
    return dispute.step, dispute.block


def go_order(job: ClusterJob) -> Go:
    """The order to make steps."""
    step = gang_of(job).restored
    why = reason("go", step=step)
    if not step and not job.spec.reports_steps:
        why = reason("go_program")  # which may go on by itself, nobody knows from where
    return Go(reason=why, job=job.id, generation=job.generation)


def drain_order(job: ClusterJob) -> Drain:
    """The order to make the state safe and leave."""
    gang = gang_of(job)
    return Drain(
        reason=reason("drain", why=str(gang.ending_why)),
        job=job.id,
        generation=job.generation,
        deadline_ns=gang.deadline_ns,
    )


def outstanding(ctx: Context, job: ClusterJob) -> list[Form | Restore | Drain]:
    """The orders that a gang has not carried out yet: what is sent again when in doubt."""
    gang = gang_of(job)
    if gang.phase == "joining":
        return [form_order(ctx, job)]
    if gang.phase == "restoring":
        return [form_order(ctx, job), restore_order(job)]
    return [drain_order(job)] if gang.phase == "draining" else []


def stop_on(ctx: Context, job: ClusterJob, nodes: tuple[int, ...], *, keep_snapshots: bool) -> None:
    """Ends whatever runs of a job on some nodes."""
    if keep_snapshots and job.gang is not None:
        job.gang.leftover = tuple(dict.fromkeys((*job.gang.leftover, *nodes)))
    if nodes:
        why = reason("stop")
        order = Stop(
            reason=why,
            job=job.id,
            generation=job.generation,
            keep_snapshots=keep_snapshots,
            confirm=any(node in job.fenced for node in nodes),
        )
        ctx.emit(nodes, order)
