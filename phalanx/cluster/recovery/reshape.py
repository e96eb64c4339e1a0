"""A gang that broke gets other nodes, fewer of them, or another mapping on those that are left."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.cluster.causes import Cause
from phalanx.cluster.context import Context
from phalanx.cluster.fleet import health
from phalanx.cluster.gang import left_memory
from phalanx.cluster.gang.fence import fence_left
from phalanx.cluster.gang.formation import form
from phalanx.cluster.gang.layout import column_slots, without_columns
from phalanx.cluster.gang.orders import stop_on
from phalanx.cluster.gang.phases import gang_of
from phalanx.cluster.jobs import measured
from phalanx.cluster.jobs.job import ClusterJob, Placement
from phalanx.cluster.jobs.lifecycle import held_gpus, spare_gpus
from phalanx.cluster.node import NodeState, lowest_bits
from phalanx.cluster.placement.choose import held_by
from phalanx.cluster.reasons import Reason, reason
from phalanx.cluster.recovery.options import Option


def reshape(ctx: Context, job: ClusterJob, option: Option, why: Reason) -> None:
    """Gives a gang its new nodes and forms the next generation on them."""
    placement = job.placement
    assert placement is not None
    gone, suspects = option.leaving, doubtful(ctx, job, option.leaving)
    nodes, masks = list(placement.nodes), list(placement.gpus)
    for slot, node in option.incoming:
        nodes[slot] = node
    freed = _cut(job, option, nodes)
    for node in gone:
        ctx.fleet.release(job.id, node)
    for slot, node in option.incoming:
        mask = occupy(ctx, job, node)
        if not masks and mask.bit_count() < ctx.fleet.nodes[node].gpus:
            masks = [0] * len(nodes)  # the others have their whole node
        if masks:
            masks[slot] = mask
    spares = [n for n in placement.spares if n not in [node for _, node in option.incoming]]
    kept = tuple(nodes)
    if option.columns:
        kept = without_columns(nodes, job.spec.gang, placement.replicas, option.columns)
        masks = (
            list(without_columns(masks, job.spec.gang, placement.replicas, option.columns))
            if masks
            else []
        )
        spares += _stand_by(ctx, job, [node for node in freed if node not in gone])
        spares += prepare(ctx, job, [node for node in option.standing_by if node not in spares])
    job.placement = Placement(
        nodes=kept,
        gpus=tuple(masks),
        spares=tuple(spares),
        replicas=option.replicas,
        cost_ns=placement.cost_ns,
        reason=why,
    )
    gang_of(job).micro_batches = ()
    if option.columns:
        gang_of(job).reshaped_ns = ctx.now_ns
    if option.standing_by:
        wake_when_ready(ctx, job, ctx.now_ns + job.expected.start_ns)
    ctx.ledger.resize(job.id, held_gpus(ctx, job), spare_gpus(ctx, job.placement))
    _stop_left(ctx, job, gone)
    form(ctx, job, why, cold=option.cold)
    settle_nodes(ctx, suspects)
    ctx.look_at_queue(capacity=True)


def remap(ctx: Context, job: ClusterJob, option: Option, why: Reason) -> None:
    """A gang forms with another mapping, on those of its nodes that are left.

    What these keep in memory is read whatever mapping made it. Healthy nodes that the mapping has
    no use for stand by.
    """
    placement, fallback = job.placement, option.fallback
    assert placement is not None and fallback is not None
    gang, suspects = gang_of(job), doubtful(ctx, job, option.leaving)
    masks = dict(zip(placement.nodes, placement.gpus, strict=True)) if placement.gpus else {}
    for node in option.leaving:
        ctx.fleet.release(job.id, node)
    kept = dict.fromkeys(option.nodes)
    idle = [n for n in placement.nodes if n not in kept and n not in option.leaving]
    spares = (*placement.spares, *_stand_by(ctx, job, idle))
    if job.own is None:
        job.own, job.own_step_ns = job.spec, job.step_ns
    job.former = job.own  # should it make no step as this
    job.spec = job.own.on_fewer_nodes(fallback)
    measured.forget(job)
    warning = reason(
        "remapped",
        before=job.own.mapping,
        after=job.spec.mapping,
        nodes=len(option.nodes),
        of=job.own.gang.slots(job.own.gang.replicas),
    )
    ctx.notify(warning, job=job.id, level="warning")
    job.placement = Placement(
        nodes=option.nodes,
        gpus=tuple(masks[node] for node in option.nodes) if masks else (),
        spares=spares,
        replicas=fallback.gang.replicas,
        reason=why,
    )
    gang.micro_batches, gang.reshaped_ns = (), ctx.now_ns
    for node in option.nodes:  # whoever reckons with when they become free learns of it
        ctx.fleet.take(job.id, node, ctx.fleet.release(job.id, node))
    ctx.queue.on_remapped(ctx.view, job)
    ctx.ledger.resize(job.id, held_gpus(ctx, job), spare_gpus(ctx, job.placement))
    _stop_left(ctx, job, [n for n in placement.nodes if n not in kept and n not in spares])
    form(ctx, job, why)
    settle_nodes(ctx, suspects)
    ctx.look_at_queue(capacity=True)


def _stop_left(ctx: Context, job: ClusterJob, nodes: Iterable[int]) -> None:
    """Nodes that a gang leaves end it; one that counts as dead may be alive and run a program."""
    nodes = tuple(nodes)
    fence_left(ctx, job, nodes)
    told = (n for n in nodes if n in job.fenced or ctx.fleet.state(n) is not NodeState.DEAD)
    stop_on(ctx, job, tuple(told), keep_snapshots=True)


def doubtful(ctx: Context, job: ClusterJob, nodes: tuple[int, ...]) -> tuple[int, ...]:
    """Nodes that a gang leaves; those that are merely kept for others need no test."""
    broken = gang_of(job).broken
    return tuple(
        node
        for node in nodes
        if broken.get(node) != Cause.HOST_MAINTENANCE
        or ctx.fleet.state(node) is not NodeState.HEALTHY
    )


def settle_nodes(ctx: Context, nodes: tuple[int, ...]) -> None:
    """Nodes that left a gang are tested, now that they are empty."""
    for node in nodes:
        if not ctx.fleet.held[node]:
            health.examine(ctx, node)


def _cut(job: ClusterJob, option: Option, nodes: list[int]) -> list[int]:
    """Nodes of the columns that are cut out."""
    placement = job.placement
    assert placement is not None
    return [
        nodes[slot]
        for column in option.columns
        for slot in column_slots(job.spec.gang, placement.replicas, column)
    ]


def occupy(ctx: Context, job: ClusterJob, node: int) -> int:
    """Gives a job a slot on a free node; returns the mask of its GPUs."""
    if ctx.fleet.state(node) is NodeState.SPARE:
        ctx.fleet.set_state(node, NodeState.HEALTHY, ctx.now_ns, reason("swapped_in", job=job.id))
    shape = job.spec.gang
    mask = lowest_bits(ctx.fleet.free_mask(node), shape.slot_gpus)
    ctx.fleet.take(job.id, node, held_by(ctx.fleet, shape, node, mask))
    left_memory.displace(ctx, job, (node,))
    return mask


def _stand_by(ctx: Context, job: ClusterJob, nodes: list[int]) -> list[int]:
    """Healthy nodes of a replica that is gone wait for it to come back."""
    waiting = []
    for node in nodes:
        ctx.fleet.release(job.id, node)
        if ctx.fleet.state(node) is NodeState.HEALTHY and not ctx.fleet.held[node]:
            waiting.append(node)
    prepare(ctx, job, waiting)
    gang_of(job).stood_by.update(dict.fromkeys(waiting, ctx.now_ns))
    return waiting


def prepare(ctx: Context, job: ClusterJob, nodes: list[int]) -> list[int]:
    """Nodes stand by for a job: they are told to start its workers, if they have none."""
    for node in nodes:
        why = reason("spare_of_job", job=job.id)
        ctx.fleet.set_state(node, NodeState.SPARE, ctx.now_ns, why, spare_for=job.id)
    return nodes


def wake_when_ready(ctx: Context, job: ClusterJob, ready_ns: int) -> None:
    """Looks at a gang again that can grow as soon as nodes have started their workers."""
    gang = gang_of(job)
    if gang.ready_ns != ready_ns:
        gang.ready_ns = ready_ns
        ctx.wake(ready_ns, "capacity", 0)
