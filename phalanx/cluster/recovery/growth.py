"""A gang takes more nodes in: which ones, whether that pays, and when.

It pays where shorter steps are worth more than the pause and what the failures to come cost more
with these very nodes. Nodes whose workers need long to start do so while the gang runs on.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct, structs

from phalanx.cluster.causes import FormationCause
from phalanx.cluster.context import Context
from phalanx.cluster.gang.formation import form
from phalanx.cluster.gang.layout import column_replicas, grid, with_columns
from phalanx.cluster.gang.node_rates import rated, rates_of
from phalanx.cluster.gang.orders import form_order, stop_on
from phalanx.cluster.gang.phases import gang_of
from phalanx.cluster.jobs import write_leases as storage
from phalanx.cluster.jobs.job import ClusterJob, Placement
from phalanx.cluster.jobs.lifecycle import held_gpus, spare_gpus
from phalanx.cluster.node import NodeState
from phalanx.cluster.placement.choose import PlacementRefusal, place, request_of
from phalanx.cluster.placement.free_index import Nodes, set_of_nodes
from phalanx.cluster.placement.replacements import POOL, candidates
from phalanx.cluster.reasons import Reason, reason
from phalanx.cluster.recovery.incoming import can_stand_by, is_warm, warm_from_ns
from phalanx.cluster.recovery.prices import (
    grown_pause_ns,
    horizon_ns,
    node_prices,
    slower_gpu_ns,
    to_come_gpu_ns,
    until_failure_ns,
)
from phalanx.cluster.recovery.reshape import occupy, prepare, wake_when_ready
from phalanx.cluster.units import SECOND_NS


class Growth(Struct, frozen=True, kw_only=True):
    """More replicas, the nodes for them, and what they are worth."""

    replicas: int  # that it would have
    nodes: tuple[int, ...]  # by slot of the new columns
    faster_gpu_ns: int  # what shorter steps are worth
    pause_gpu_ns: int
    failures_gpu_ns: int  # what failures to come cost more, or less

    @property
    def gain_gpu_ns(self) -> int:
        """All of it together."""
        return self.faster_gpu_ns - self.pause_gpu_ns - self.failures_gpu_ns


def grow(ctx: Context, job: ClusterJob, replicas: int, *, early: bool = False) -> None:
    """Adds as many whole columns as pay, or has the nodes for them start workers first.

    ``early``: it was reshaped so lately that nodes may only start.
    """
    if early and not _starts_slowly(ctx, job):
        return
    best = max(_growths(ctx, job, replicas), key=lambda each: each.gain_gpu_ns, default=None)
    if best is None:
        return
    if best.gain_gpu_ns <= 0:
        _tell_declined(ctx, job, best)
        return
    cold = [node for node in best.nodes if not is_warm(ctx, job, node)]
    if cold and _starts_slowly(ctx, job) and can_stand_by(ctx, job, cold):
        _start_first(ctx, job, cold)
    elif not early:
        _take_in(ctx, job, best)


def _starts_slowly(ctx: Context, job: ClusterJob) -> bool:
    """Whether a gang does not wait for workers to start."""
    return job.expected.start_ns > ctx.policy.recovery.start_wait_ns


def _growths(ctx: Context, job: ClusterJob, replicas: int) -> Iterator[Growth]:
    """What a gang could grow to: without nodes that fail more often than others, and with all."""
    placement, shape = job.placement, job.spec.gang
    assert placement is not None
    together = column_replicas(shape, placement.replicas)
    if not together:
        return
    stages, _, wide = grid(shape, placement.replicas)
    needed = stages * wide
    wanted = _within_limits(ctx, job, (replicas - placement.replicas) // together, needed)
    if wanted <= 0:
        return
    for shunned in dict.fromkeys((_risky(ctx, job), 0)):
        columns, nodes = _most_columns(ctx, job, wanted, needed, shunned)
        if columns:
            yield _priced(ctx, job, placement.replicas + columns * together, nodes)


def _risky(ctx: Context, job: ClusterJob) -> Nodes:
    """Nodes that would cost a gang more by their failures than the best of its own kind."""
    assert job.placement is not None
    prices, classes = node_prices(ctx, job), ctx.fleet.columns.node_class
    more_ns = (
        prices.failures_ns - prices.failures_ns[classes == classes[job.placement.nodes[0]]].min()
    )
    return set_of_nodes(np.flatnonzero(more_ns >= prices.alike_ns).tolist())


def _priced(ctx: Context, job: ClusterJob, replicas: int, nodes: tuple[int, ...]) -> Growth:
    placement, shape = job.placement, job.spec.gang
    assert placement is not None
    on, gpus = rated(ctx, placement.nodes, incoming=nodes), shape.gpus(replicas)
    span_ns = lasts_ns = horizon_ns(ctx, job)
    slow_start = _starts_slowly(ctx, job) and can_stand_by(ctx, job, nodes)
    # With nobody standing by, the next failure makes it small again.
    if slow_start and all(node in nodes for node in placement.spares):
        lasts_ns = until_failure_ns(on, gpus, span_ns)
    cold = not slow_start and not all(is_warm(ctx, job, node) for node in nodes)
    return Growth(
        replicas=replicas,
        nodes=nodes,
        faster_gpu_ns=-slower_gpu_ns(job, replicas, lasts_ns),
        pause_gpu_ns=grown_pause_ns(ctx, job, on, cold=cold) * ctx.ledger.accounts[job.id].gpus,
        failures_gpu_ns=to_come_gpu_ns(ctx, job, on, gpus, span_ns),
    )


def _tell_declined(ctx: Context, job: ClusterJob, best: Growth) -> None:
    """Says once that a gang stays small for the failures that more nodes would bring."""
    gang = gang_of(job)
    if best.faster_gpu_ns <= best.pause_gpu_ns or gang.declined_ns > gang.reshaped_ns:
        return
    gang.declined_ns = ctx.now_ns
    ctx.notify(_worth("stays_small", job, best), job=job.id)


def _worth(code: str, job: ClusterJob, growth: Growth) -> Reason:
    assert job.placement is not None
    return reason(
        code,
        added=growth.replicas - job.placement.replicas,
        faster=growth.faster_gpu_ns // SECOND_NS,
        pause=growth.pause_gpu_ns // SECOND_NS,
        failures=growth.failures_gpu_ns // SECOND_NS,
    )


def _start_first(ctx: Context, job: ClusterJob, cold: list[int]) -> None:
    """Nodes stand by until their workers have started; the gang runs on meanwhile."""
    placement = job.placement
    assert placement is not None
    new = tuple(prepare(ctx, job, [node for node in cold if node not in placement.spares]))
    if new:
        job.placement = structs.replace(placement, spares=(*placement.spares, *new))
        ctx.emit(new, form_order(ctx, job))
        account = ctx.ledger.accounts[job.id]
        ctx.ledger.resize(job.id, account.gpus, spare_gpus(ctx, job.placement))
    wake_when_ready(ctx, job, max(warm_from_ns(ctx, job, node) for node in cold))


def _take_in(ctx: Context, job: ClusterJob, growth: Growth) -> None:
    placement, shape = job.placement, job.spec.gang
    assert placement is not None
    nodes, old, why = growth.nodes, placement.replicas, _worth("grow", job, growth)
    ctx.ledger.fail(job.id, FormationCause.RESIZE)
    taken = [occupy(ctx, job, node) for node in nodes]
    masks = placement.gpus or (0,) * len(placement.nodes)  # 0: the whole node
    whole = not placement.gpus and not any(_shared(ctx, node) for node in nodes)
    spares = tuple(node for node in placement.spares if node not in nodes)
    kept = spares[: job.spec.spares] if growth.replicas >= job.wanted_replicas else spares
    job.placement = Placement(
        with_columns(placement.nodes, shape, old, nodes),
        () if whole else with_columns(masks, shape, old, taken),
        kept,
        growth.replicas,
        placement.cost_ns,
        why,
    )
    _give_back(ctx, job, spares[len(kept) :])
    reform(ctx, job, why)


def _give_back(ctx: Context, job: ClusterJob, nodes: tuple[int, ...]) -> None:
    """Nodes that stood by for a gang that has all its replicas again are for everybody."""
    for node in nodes:
        why = reason("stands_by_no_more")
        ctx.fleet.set_state(node, NodeState.HEALTHY, ctx.now_ns, why)
    stop_on(ctx, job, nodes, keep_snapshots=True)
    if nodes:
        ctx.look_at_queue(capacity=True)


def reform(ctx: Context, job: ClusterJob, why: Reason) -> None:
    """A gang that ran forms with the nodes that it has now."""
    assert job.placement is not None
    gang = gang_of(job)
    gang.cause, gang.culprit, gang.micro_batches = FormationCause.RESIZE, -1, ()
    gang.reshaped_ns = ctx.now_ns
    gang.stood_by = {n: at for n, at in gang.stood_by.items() if n in job.placement.spares}
    ctx.ledger.resize(job.id, held_gpus(ctx, job), spare_gpus(ctx, job.placement))
    storage.left(ctx, job.id)
    form(ctx, job, why)


def _within_limits(ctx: Context, job: ClusterJob, columns: int, needed: int) -> int:
    """How many of some columns the ceilings of a job's team and class of service allow."""
    assert job.placement is not None
    ctx.queue.sync(ctx.view)
    left = ctx.queue.limits.growth_allowance(ctx.view, job)
    node = max((known.gpus for known in ctx.fleet.classes), default=0)
    each = node if job.spec.gang.whole_nodes else job.spec.gang.slot_gpus
    spares = len(job.placement.spares)  # they are counted already, and used first
    while columns > 0 and columns * needed * each - min(spares, columns * needed) * node > left:
        columns -= 1
    return columns


def _shared(ctx: Context, node: int) -> bool:
    held = ctx.fleet.held[node]
    return sum(part.gpus.bit_count() for part in held.values()) < ctx.fleet.nodes[node].gpus


def _most_columns(
    ctx: Context, job: ClusterJob, wanted: int, needed: int, shunned: Nodes
) -> tuple[int, tuple[int, ...]]:
    """The most columns, up to some, that there are nodes for, and these nodes by slot."""
    least = 0
    best: tuple[int, ...] = ()
    while least < wanted:
        middle = (least + wanted + 1) // 2
        nodes = _nodes_for(ctx, job, middle, needed, shunned)
        if nodes is None:
            wanted = middle - 1
        else:
            least, best = middle, nodes
    return least, best


def _nodes_for(
    ctx: Context, job: ClusterJob, columns: int, needed: int, shunned: Nodes
) -> tuple[int, ...] | None:
    """Nodes by slot for more columns: a job's spares, the pool's where it lost nodes, free ones.

    None: there are not enough without the ``shunned`` ones.
    """
    assert job.placement is not None
    base = request_of(job, 0, ctx.policy)
    shut = ctx.queue.shut_now(ctx.view, job) | shunned
    spares = tuple(node for node in job.placement.spares if not shut >> node & 1)
    together = column_replicas(base.shape, job.placement.replicas)
    if base.shape.tensor * base.shape.context > max(1, base.shape.slot_gpus):
        # A tensor group of several nodes must stand in one domain: placed as a gang of its own.
        closed = ctx.queue.closed_to(ctx.view, job) | shunned
        mine = set_of_nodes(spares)
        whole = structs.replace(
            base, replicas=columns * together, spares=0, closed=closed & ~mine, own=mine
        )
        found = place(ctx.fleet, whole)
        return None if isinstance(found, PlacementRefusal) else found.nodes
    safest = _safest_first(ctx, spares)
    if job.placement.replicas + columns * together <= job.spec.gang.replicas:
        safest += _safest_first(ctx, _pool(ctx, job, shut))
    own = safest[: columns * needed]
    rest = columns * needed - len(own)
    if not rest:
        return own
    free = free_nodes(ctx, job, rest, whole=False, shunned=shunned)
    return None if free is None else (*own, *free)


def _safest_first(ctx: Context, nodes: tuple[int, ...]) -> tuple[int, ...]:
    """Nodes in their order, those that fail least often first."""
    rates = dict(zip(nodes, rates_of(ctx, nodes), strict=True))
    return tuple(sorted(nodes, key=rates.__getitem__))


def _pool(ctx: Context, job: ClusterJob, shut: Nodes) -> tuple[int, ...]:
    """Spares of the fleet that suit a job: they are there to replace what it lost."""
    assert job.placement is not None
    request = structs.replace(request_of(job, 0, ctx.policy), keep=job.placement.nodes)
    pool, shut = candidates(ctx.fleet, request)[POOL], shut | ctx.queue.closed_to(ctx.view, job)
    return tuple(node for node in pool.tolist() if not shut >> node & 1)


def free_nodes(
    ctx: Context, job: ClusterJob, count: int, *, whole: bool, shunned: Nodes = 0
) -> tuple[int, ...] | None:
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
        closed=ctx.queue.closed_to(ctx.view, job) | shunned,
    )
    found = place(ctx.fleet, request)
    return None if isinstance(found, PlacementRefusal) else found.nodes
