"""Jobs that change size while they live: growing back, scaling on request, getting spares."""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.context import Context
from phalanx.cluster.fleet import spare_pool as pool
from phalanx.cluster.fleet.node import NodeState
from phalanx.cluster.gang.fence import fence_left
from phalanx.cluster.gang.formation import form
from phalanx.cluster.gang.layout import (
    column_replicas,
    column_slots,
    grid,
    with_columns,
    without_columns,
)
from phalanx.cluster.gang.orders import form_order, stop_on
from phalanx.cluster.gang.phases import gang_of
from phalanx.cluster.jobs import write_leases as storage
from phalanx.cluster.jobs.feasibility import beyond_limits
from phalanx.cluster.jobs.job import Job, Placement
from phalanx.cluster.jobs.lifecycle import held_gpus, spare_gpus
from phalanx.cluster.jobs.requests import known
from phalanx.cluster.placement.choose import PlacementRefusal, place, request_of
from phalanx.cluster.placement.free_index import set_of_nodes
from phalanx.cluster.protocol.commands import Accept, Refuse
from phalanx.cluster.protocol.events import Scale
from phalanx.cluster.reasons import Reason, reason
from phalanx.cluster.recovery.own_mapping import return_to_own
from phalanx.cluster.recovery.prices import horizon_ns, slower_gpu_ns
from phalanx.cluster.recovery.reshape import occupy


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


def _cannot_scale(job: Job, replicas: int) -> Reason | None:
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


def resize(ctx: Context, job: Job, replicas: int, why: Reason) -> None:
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


def give_up(ctx: Context, job: Job, columns: int, why: Reason) -> None:
    """Releases the last columns of a running gang to the fleet."""
    placement, shape = job.placement, job.spec.gang
    assert placement is not None
    _, count, _ = grid(shape, placement.replicas)
    gone = range(count - columns, count)
    slots = [slot for column in gone for slot in column_slots(shape, placement.replicas, column)]
    nodes = tuple(placement.nodes[slot] for slot in slots)
    ctx.ledger.fail(job.id, "resize")
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
    _reform(ctx, job, why)
    fence_left(ctx, job, nodes)
    stop_on(ctx, job, nodes, keep_snapshots=True)
    ctx.look_at_queue(capacity=True)


def grow(ctx: Context, job: Job, replicas: int) -> None:
    """Adds as many whole columns as there are nodes for, if that pays."""
    placement, shape = job.placement, job.spec.gang
    assert placement is not None
    together = column_replicas(shape, placement.replicas)
    if not together:
        return
    stages, _, wide = grid(shape, placement.replicas)
    needed = stages * wide
    wanted = _within_limits(ctx, job, (replicas - placement.replicas) // together, needed)
    columns, nodes = _most_columns(ctx, job, wanted, needed)
    if not columns or not _pays(ctx, job, placement.replicas + columns * together):
        return
    ctx.ledger.fail(job.id, "resize")
    taken = [occupy(ctx, job, node) for node in nodes]
    old = placement.replicas
    masks = placement.gpus or (0,) * len(placement.nodes)  # 0: the whole node
    whole = not placement.gpus and not any(_shared(ctx, node) for node in nodes)
    job.placement = Placement(
        with_columns(placement.nodes, shape, old, nodes),
        () if whole else with_columns(masks, shape, old, taken),
        tuple(node for node in placement.spares if node not in nodes),
        old + columns * together,
        placement.cost_ns,
        reason("grow", added=columns * together),
    )
    _reform(ctx, job, job.placement.reason)


def _within_limits(ctx: Context, job: Job, columns: int, needed: int) -> int:
    """How many of some columns the ceilings of a job's team and class of service allow."""
    assert job.placement is not None
    ctx.queue.sync(ctx.view)
    left = ctx.queue.limits.growth_allowance(ctx.view, job.spec.team, job.spec.qos)
    node = max((known.gpus for known in ctx.fleet.classes), default=0)
    each = node if job.spec.gang.whole_nodes else job.spec.gang.slot_gpus
    spares = len(job.placement.spares)  # they are counted already, and used first
    while columns > 0 and columns * needed * each - min(spares, columns * needed) * node > left:
        columns -= 1
    return columns


def _shared(ctx: Context, node: int) -> bool:
    held = ctx.fleet.held[node]
    return sum(part.gpus.bit_count() for part in held.values()) < ctx.fleet.nodes[node].gpus


def _most_columns(ctx: Context, job: Job, wanted: int, needed: int) -> tuple[int, tuple[int, ...]]:
    """The most columns, up to some, that there are nodes for, and these nodes by slot."""
    least = 0
    best: tuple[int, ...] = ()
    while least < wanted:
        middle = (least + wanted + 1) // 2
        nodes = _nodes_for(ctx, job, middle, needed)
        if nodes is None:
            wanted = middle - 1
        else:
            least, best = middle, nodes
    return least, best


def _reform(ctx: Context, job: Job, why: Reason) -> None:
    assert job.placement is not None
    gang = gang_of(job)
    gang.cause, gang.culprit, gang.micro_batches = "resize", -1, ()
    gang.reshaped_ns = ctx.now_ns
    ctx.ledger.resize(job.id, held_gpus(ctx, job), spare_gpus(ctx, job.placement))
    storage.left(ctx, job.id)
    form(ctx, job, why)


def _nodes_for(ctx: Context, job: Job, columns: int, needed: int) -> tuple[int, ...] | None:
    """Nodes by slot for more columns of a job: its spares, then free ones; None: not enough."""
    assert job.placement is not None
    base = request_of(job, 0, ctx.policy)
    shut = ctx.queue.shut_now(ctx.view, job)
    spares = tuple(node for node in job.placement.spares if not shut >> node & 1)
    if base.shape.tensor * base.shape.context > max(1, base.shape.slot_gpus):
        # A tensor group of several nodes must stand in one domain: placed as a gang of its own.
        together = column_replicas(base.shape, job.placement.replicas)
        closed = ctx.queue.closed_to(ctx.view, job)
        mine = set_of_nodes(spares)
        whole = structs.replace(
            base, replicas=columns * together, spares=0, closed=closed & ~mine, own=mine
        )
        found = place(ctx.fleet, whole)
        return None if isinstance(found, PlacementRefusal) else found.nodes
    own = spares[: columns * needed]
    rest = columns * needed - len(own)
    if not rest:
        return own
    free = _free_nodes(ctx, job, rest, whole=False)
    return None if free is None else (*own, *free)


def _free_nodes(ctx: Context, job: Job, count: int, *, whole: bool) -> tuple[int, ...] | None:
    """So many free nodes on which a slot of a job could stand; None: there are fewer."""
    base = request_of(job, 0, ctx.policy)
    flat = structs.replace(
        base.shape,
        replicas=count,
        tensor=max(1, base.shape.slot_gpus),
        context=1,
        pipeline=1,
        whole_nodes=whole or base.shape.whole_nodes,
        traffic=(),
    )
    assert job.placement is not None
    request = structs.replace(
        base,
        shape=flat,
        replicas=count,
        spares=0,
        avoid=job.placement.nodes,
        closed=ctx.queue.closed_to(ctx.view, job),
    )
    found = place(ctx.fleet, request)
    return None if isinstance(found, PlacementRefusal) else found.nodes


def _pays(ctx: Context, job: Job, replicas: int) -> bool:
    """Whether steps of more replicas are so much faster that it is worth the pause."""
    expected = job.expected
    pause = expected.start_ns + expected.form_ns + expected.restore_peer_ns
    gpus = ctx.ledger.accounts[job.id].gpus
    return -slower_gpu_ns(job, replicas, horizon_ns(ctx, job)) > pause * gpus


def use_capacity(ctx: Context) -> None:
    """Nodes became free, and the queue has not been looked at: what comes before it.

    A job that became small takes part as if it had waited since then: it grows first if its
    priority is at least that of the first in line. Spares are kept full whoever waits.
    """
    small = [job for job in _small(ctx) if ctx.now_ns >= _reshaped_again_ns(ctx, job)]
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
        if ctx.now_ns >= _reshaped_again_ns(ctx, job):
            _grow_back(ctx, job)
        else:
            ctx.wake(_reshaped_again_ns(ctx, job), "capacity", 0)


def _grow_back(ctx: Context, job: Job) -> None:
    if job.own is not None:
        return_to_own(ctx, job)
    else:
        grow(ctx, job, job.wanted_replicas)


def _wanting(ctx: Context) -> list[Job]:
    """Jobs that may want more nodes than they hold, the first that started first."""
    for number in [number for number in ctx.wanting if number not in ctx.view.active]:
        del ctx.wanting[number]
    jobs = map(ctx.view.jobs.__getitem__, ctx.wanting)
    return sorted(jobs, key=lambda job: (job.started_ns, job.id))


def _small(ctx: Context) -> list[Job]:
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


def _reshaped_again_ns(ctx: Context, job: Job) -> int:
    """When a gang may be reshaped once more without need."""
    return gang_of(job).reshaped_ns + ctx.policy.recovery.grow_after_ns


def lacks_spares(job: Job) -> bool:
    """Whether a job that runs in its full size has fewer spares than it asked for."""
    placement = job.placement
    if placement is None or placement.replicas < job.wanted_replicas:
        return False
    return len(placement.spares) < job.spec.spares


def fill_spares(ctx: Context, job: Job) -> None:
    """Gives a job idle nodes until it has the spares it asked for."""
    placement = job.placement
    assert placement is not None
    columns = ctx.fleet.columns
    idle = (columns.state == NodeState.HEALTHY) & (columns.free_gpus == columns.gpus)
    ctx.queue.sync(ctx.view)
    left = ctx.queue.limits.growth_allowance(ctx.view, job.spec.team, job.spec.qos)
    node_gpus = max((known.gpus for known in ctx.fleet.classes), default=0)
    allowed = left // node_gpus if node_gpus else job.spec.spares
    wanted = min(job.spec.spares - len(placement.spares), int(idle.sum()), allowed)
    chosen = None
    while wanted > 0 and chosen is None:
        chosen = _free_nodes(ctx, job, wanted, whole=True)
        wanted //= 2  # some of the idle ones do not suit it
    if not chosen:
        return
    for node in chosen:
        why = reason("spare_of_job", job=job.id)
        ctx.fleet.set_state(node, NodeState.SPARE, ctx.now_ns, why, spare_for=job.id)
    job.placement = structs.replace(placement, spares=(*placement.spares, *chosen))
    # They start their workers now, so that a swap finds them warm.
    ctx.emit(chosen, form_order(ctx, job))
    account = ctx.ledger.accounts[job.id]
    ctx.ledger.resize(job.id, account.gpus, spare_gpus(ctx, job.placement))
