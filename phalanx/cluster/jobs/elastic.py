"""Jobs that change size while they live: growing back, scaling on request, getting spares."""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.causes import FormationCause
from phalanx.cluster.context import Context
from phalanx.cluster.fleet import spare_pool as pool
from phalanx.cluster.gang.fence import fence_left
from phalanx.cluster.gang.layout import (
    column_replicas,
    column_slots,
    grid,
    without_columns,
)
from phalanx.cluster.gang.orders import form_order, stop_on
from phalanx.cluster.gang.phases import gang_of
from phalanx.cluster.jobs.feasibility import beyond_limits
from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.jobs.lifecycle import spare_gpus
from phalanx.cluster.jobs.requests import known
from phalanx.cluster.node import NodeState
from phalanx.cluster.protocol.commands import Accept, Refuse
from phalanx.cluster.protocol.events import Scale
from phalanx.cluster.reasons import Reason, reason
from phalanx.cluster.recovery.growth import free_nodes, grow, reform
from phalanx.cluster.recovery.own_mapping import return_to_own
from phalanx.cluster.recovery.reshape import prepare


def on_scale(ctx: Context, fact: Scale) -> None:
    """A person wants another number of replicas."""
    job = known(ctx, fact.job, fact.request)
    if job is None:
        return
    bad = _cannot_scale(job, fact.replicas)
    if bad is not None:
        ctx.emit((), Refuse(reason=bad, request=fact.request, job=job.id))
        return
    job.wanted = fact.replicas
    ctx.note_wants(job)
    if job.id in ctx.view.pending:  # it asks for something else now, and no promise fits
        ctx.queue.on_withdrawn(ctx.view, job)
        ctx.queue.on_pending(ctx.view, job)
        ctx.look_at_queue()
    if job.own is None:  # else it has so many when it returns to its own mapping
        resize(ctx, job, fact.replicas, reason("scale", replicas=fact.replicas))
    limit = beyond_limits(ctx.view, job, fact.replicas)
    told = reason("accepted") if limit is None else reason("scaled_in_part", why=str(limit))
    ctx.emit((), Accept(reason=told, request=fact.request, job=job.id))


def _cannot_scale(job: ClusterJob, replicas: int) -> Reason | None:
    """Why a job cannot have this many replicas; None: it can."""
    shape, placement = (job.own or job.spec).gang, job.placement
    if not shape.floor <= replicas <= shape.ceiling:
        return reason("not_elastic", job=job.id, least=shape.floor, most=shape.ceiling)
    if placement is None or job.own is not None or replicas == placement.replicas:
        return None
    has, together = placement.replicas, column_replicas(shape, placement.replicas)
    if not together:
        return reason("not_resizable", job=job.id, replicas=has)
    if (replicas - has) % together:
        return reason("not_divisible", job=job.id, replicas=has, together=together)
    return None


def resize(ctx: Context, job: ClusterJob, replicas: int, why: Reason) -> None:
    """Moves a running gang towards a number of replicas."""
    placement = job.placement
    if placement is None or gang_of(job).phase != "running":
        return
    together = column_replicas(job.spec.gang, placement.replicas)
    columns = (placement.replicas - replicas) // together if together else 0
    if columns > 0:
        give_up(ctx, job, columns, why)
    elif replicas > placement.replicas:
        grow(ctx, job, replicas)


def give_up(ctx: Context, job: ClusterJob, columns: int, why: Reason) -> None:
    """Releases the last columns of a running gang to the fleet."""
    placement, shape = job.placement, job.spec.gang
    assert placement is not None
    _, count, _ = grid(shape, placement.replicas)
    gone = range(count - columns, count)
    slots = [slot for column in gone for slot in column_slots(shape, placement.replicas, column)]
    nodes = tuple(placement.nodes[slot] for slot in slots)
    ctx.ledger.fail(job.id, FormationCause.RESIZE)
    for node in nodes:
        ctx.fleet.release(job.id, node)
    together = column_replicas(shape, placement.replicas)
    job.placement = structs.replace(
        placement,
        nodes=without_columns(placement.nodes, shape, placement.replicas, gone),
        gpus=without_columns(placement.gpus, shape, placement.replicas, gone)
        if placement.gpus
        else (),
        replicas=placement.replicas - columns * together,
    )
    reform(ctx, job, why)
    fence_left(ctx, job, nodes)
    stop_on(ctx, job, nodes, keep_snapshots=True)
    ctx.look_at_queue(capacity=True)


def use_capacity(ctx: Context) -> None:
    """Nodes became free, and the queue has not been looked at: what comes before it.

    A job that became small takes part as if it had waited since then: it grows first if its
    priority is at least that of the first in line. Spares are kept full whoever waits.
    """
    small = _small(ctx)
    first = ctx.queue.first_priority(ctx.view) if small else None
    for job in small:
        if first is None or ctx.queue.priority(ctx.view, job, gang_of(job).reshaped_ns) >= first:
            _grow_back(ctx, job)
    for job in _wanting(ctx):
        if lacks_spares(job) and gang_of(job).phase == "running":
            fill_spares(ctx, job)
    pool.fill_pool(ctx)


def use_the_rest(ctx: Context) -> None:
    """The queue has taken what it could: every job that is too small takes what it left."""
    for job in _small(ctx):
        again_ns = _reshaped_again_ns(ctx, job)
        _grow_back(ctx, job)
        if ctx.now_ns < again_ns:
            ctx.wake(again_ns, "capacity", 0)


def _grow_back(ctx: Context, job: ClusterJob) -> None:
    early = ctx.now_ns < _reshaped_again_ns(ctx, job)
    if job.own is None:
        grow(ctx, job, job.wanted_replicas, early=early)
    elif not early:
        return_to_own(ctx, job)


def _wanting(ctx: Context) -> list[ClusterJob]:
    """Jobs that may want more nodes than they hold, the first that started first."""
    for number in [number for number in ctx.wanting if number not in ctx.view.active]:
        del ctx.wanting[number]
    jobs = map(ctx.view.jobs.__getitem__, ctx.wanting)
    return sorted(jobs, key=lambda job: (job.started_ns, job.id))


def _small(ctx: Context) -> list[ClusterJob]:
    """Jobs that run with fewer replicas than they should, or as one of their fallbacks."""
    small = []
    for job in _wanting(ctx):
        placement, shape = job.placement, job.spec.gang
        if job.own is not None and gang_of(job).phase == "running":
            small.append(job)
            continue
        elastic = shape.least_replicas or shape.most_replicas
        if placement is None or not elastic or gang_of(job).phase != "running":
            continue
        if placement.replicas < job.wanted_replicas:
            small.append(job)
        elif not job.spec.spares:
            del ctx.wanting[job.id]
    return small


def _reshaped_again_ns(ctx: Context, job: ClusterJob) -> int:
    """When a gang may be reshaped once more without need.

    Nodes that it went on without, because they were slow to start, come in as soon as they have.
    """
    gang = gang_of(job)
    again_ns = gang.reshaped_ns + ctx.policy.recovery.grow_after_ns
    return min(again_ns, gang.ready_ns) if gang.ready_ns > gang.reshaped_ns else again_ns


def lacks_spares(job: ClusterJob) -> bool:
    """Whether a job that runs in its full size has fewer spares than it asked for."""
    placement = job.placement
    if placement is None or placement.replicas < job.wanted_replicas:
        return False
    return len(placement.spares) < job.spec.spares


def fill_spares(ctx: Context, job: ClusterJob) -> None:
    """Gives a job idle nodes until it has the spares it asked for."""
    placement = job.placement
    assert placement is not None
    columns = ctx.fleet.columns
    idle = (columns.state == NodeState.HEALTHY) & (columns.free_gpus == columns.gpus)
    ctx.queue.sync(ctx.view)
    left = ctx.queue.limits.growth_allowance(ctx.view, job)
    node_gpus = max((known.gpus for known in ctx.fleet.classes), default=0)
    allowed = left // node_gpus if node_gpus else job.spec.spares
    wanted = min(job.spec.spares - len(placement.spares), int(idle.sum()), allowed)
    chosen = None
    while wanted > 0 and chosen is None:
        chosen = free_nodes(ctx, job, wanted, whole=True)
        wanted //= 2  # some of the idle ones do not suit it
    if not chosen:
        return
    prepare(ctx, job, list(chosen))
    job.placement = structs.replace(placement, spares=(*placement.spares, *chosen))
    # They start their workers now, so that a swap finds them warm.
    ctx.emit(chosen, form_order(ctx, job))
    account = ctx.ledger.accounts[job.id]
    ctx.ledger.resize(job.id, account.gpus, spare_gpus(ctx, job.placement))
