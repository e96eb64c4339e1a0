"""The ways out of a failure, each with the GPU-nanoseconds it is predicted to cost.

Pure: reads the state, changes nothing. The cheapest is taken; on a tie, the first.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct, structs

from phalanx.cluster.causes import Cause
from phalanx.cluster.context import Context
from phalanx.cluster.gang import left_memory
from phalanx.cluster.gang.layout import column_of, column_replicas, column_slots
from phalanx.cluster.gang.losses import in_memory
from phalanx.cluster.gang.node_rates import RatedNodes, rated
from phalanx.cluster.gang.phases import gang_of, last_call_ns
from phalanx.cluster.jobs.job import LONGEST_NS, ClusterJob, FallbackMapping
from phalanx.cluster.jobs.measured import waiting_parts_ns
from phalanx.cluster.node import NodeState
from phalanx.cluster.placement.choose import PlacementRefusal, place, request_of
from phalanx.cluster.recovery.fallbacks import best_fallback
from phalanx.cluster.recovery.incoming import Pairs, can_stand_by, incoming, is_warm
from phalanx.cluster.recovery.prices import (
    as_it_is,
    failures_ppm,
    grown_pause_ns,
    horizon_ns,
    missing_ns,
    pause_ns,
    recur_ppm,
    shrunk_gpu_ns,
    slower_ns,
    step_ns,
    through_ns,
    times_failed,
    to_come_gpu_ns,
)
from phalanx.cluster.recovery.shares import rebalanced
from phalanx.cluster.units import MILLION


class Rung(StrEnum):
    """What can be done about a failure."""

    IN_PLACE = "in_place"  # the same nodes form again
    SWAP = "swap"  # others take the places of nodes that leave
    SHRINK = "shrink"  # it goes on with fewer replicas
    REMAP = "remap"  # it goes on with another mapping, on the nodes that are left
    WAIT = "wait"  # it leaves, its nodes stay empty for it, and it waits for the missing ones
    REQUEUE = "requeue"  # it leaves, and waits for nodes
    REBALANCE = "rebalance"  # a slow replica gets fewer micro-batches
    DEGRADED = "degraded"  # it goes on as it is, slower


LEAVES = (Rung.WAIT, Rung.REQUEUE)  # it gives its nodes back
WORTH_LEAVING = 20  # part of the next best loss: for less nobody gives up nodes and may wait
FIXED_ORDER = (Rung.IN_PLACE, Rung.SWAP, Rung.SHRINK, Rung.REQUEUE)


class Option(Struct, frozen=True, kw_only=True):
    """One way out."""

    rung: Rung
    loss_gpu_ns: int
    leaving: tuple[int, ...] = ()  # nodes that leave the gang
    incoming: Pairs = ()  # (slot, node) that takes its place
    standing_by: tuple[int, ...] = ()  # nodes that start workers while the gang goes on without
    columns: tuple[int, ...] = ()  # that are cut out
    replicas: int = 0
    micro_batches: tuple[int, ...] = ()
    cold: bool = False  # a worker must be started on a node that has none standing by
    fallback: FallbackMapping | None = None  # another mapping, on ``nodes``
    nodes: tuple[int, ...] = ()


def options(ctx: Context, job: ClusterJob, *, saves: bool = False) -> list[Option]:
    """Every way out of the current failure of a job, cheapest first.

    ``saves``: nothing has failed yet, so it can write a checkpoint before it is queued again.
    """
    must, may = leaving(ctx, job)
    allowed = ctx.policy.recovery
    ways: list[Option] = []
    missing_by_ns: int | None = 0
    # A fixed ladder goes on to its next rung where the first did not help.
    again = allowed.order == "fixed" and any(times_failed(ctx, node) > 1 for node in may)
    if allowed.in_place and not must and not again:
        ways.append(_in_place(ctx, job, may))
    for gone in dict.fromkeys(((*must, *may), must)):
        if not gone:
            continue
        replacements = incoming(ctx, job, gone) if allowed.swap else ()
        if len(replacements) == len(gone):
            way = _reshaped(ctx, job, gone, replacements, ())
            ways.append(way)
            if way.cold and not saves:
                ways += _goes_on_without(ctx, job, gone, replacements)
            continue
        missing_by_ns = missing_ns(ctx, job, gone, len(gone) - len(replacements))
        back_ns = None if missing_by_ns is None else max(missing_by_ns, allowed.grow_after_ns)
        for partly in dict.fromkeys((replacements, ())) if allowed.shrink else ():
            ways += _shrunk(ctx, job, gone, partly, back_ns)
    if (must or may) and not ways and not saves and allowed.order == "predicted":
        ways += _waiting(ctx, job, (*must, *may), missing_by_ns)
    if missing_by_ns != 0 and allowed.order == "predicted":
        ways += _remapped(ctx, job, must or may, missing_by_ns)
    best = min((option.loss_gpu_ns for option in ways), default=None)
    ways.append(_requeued(ctx, job, best, missing_by_ns, saves=saves))
    if allowed.order == "fixed":
        return sorted(ways, key=lambda option: FIXED_ORDER.index(option.rung))
    return sorted(ways, key=lambda option: option.loss_gpu_ns)  # stable: a tie keeps the order


def leaving(ctx: Context, job: ClusterJob) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Nodes of a gang that must leave it, and those that had better."""
    assert job.placement is not None
    gang = gang_of(job)
    must: dict[int, None] = {}
    may: dict[int, None] = {}
    for node, name in gang.broken.items():
        verdict = Cause.of(name).node
        state = ctx.fleet.state(node)
        if state is NodeState.DRAINING and (name == Cause.HOST_MAINTENANCE or verdict != "replace"):
            # Nothing is wrong with it: a gang that leaves as a whole may form there once more,
            # and one that lost a worker there uses it while there is time.
            until_ns = last_call_ns(ctx, job, ctx.health.drain_deadline.get(node, 0))
            stays = gang.ending is not None or (verdict == "keep" and ctx.now_ns < until_ns)
            must.update({} if stays else {node: None})
        elif (
            state is NodeState.HEALTHY
            and name == Cause.HOST_MAINTENANCE
            and gang.ending is not None
        ):
            continue  # it is kept for others soon
        elif state in (NodeState.DEAD, NodeState.QUARANTINED) or verdict == "replace":
            must[node] = None
        elif verdict == "suspect":
            may[node] = None
    return tuple(must), tuple(may)


def _in_place(ctx: Context, job: ClusterJob, suspects: tuple[int, ...]) -> Option:
    gang = gang_of(job)
    assert job.placement is not None
    gpus = ctx.ledger.accounts[job.id].gpus
    again_ns = job.expected.join_ns(cold=False)
    down = pause_ns(ctx, job, as_it_is(ctx, job), gpus, started_ns=again_ns) * gpus
    recur = max((recur_ppm(ctx, node, gang.broken[node]) for node in suspects), default=0)
    # A failure that comes back is paid for again, and again.
    again = down * recur // max(1, MILLION - recur)
    return Option(rung=Rung.IN_PLACE, loss_gpu_ns=down + again, replicas=job.placement.replicas)


def _reshaped(
    ctx: Context,
    job: ClusterJob,
    gone: tuple[int, ...],
    taken: Pairs,
    columns: tuple[int, ...],
    back_ns: int | None = None,
) -> Option:
    """``back_ns``: until the columns that are cut out are back; None: nobody can say."""
    placement, shape = job.placement, job.spec.gang
    assert placement is not None
    cold = not all(is_warm(ctx, job, node) for _, node in taken)
    # A worker that merely lost its peer lives on and joins again.
    ended = [
        n for n, why in gang_of(job).broken.items() if n not in gone and why != Cause.LOST_PEER
    ]
    expected = job.expected
    started = expected.join_ns(cold=cold) if cold or ended else expected.rejoin_ns
    replicas = placement.replicas - len(columns) * column_replicas(shape, placement.replicas)
    gpus, on = shape.gpus(replicas), _rated_with(ctx, job, taken, columns)
    loss = pause_ns(ctx, job, on, gpus, started_ns=started, lost=gone) * gpus
    span_ns = horizon_ns(ctx, job)
    if columns:
        back_ns = LONGEST_NS if back_ns is None else back_ns
        span_ns = min(span_ns, back_ns)
        loss += shrunk_gpu_ns(ctx, job, replicas, back_ns)
    loss += to_come_gpu_ns(ctx, job, on, gpus, span_ns)
    return Option(
        rung=Rung.SHRINK if columns else Rung.SWAP,
        loss_gpu_ns=loss,
        leaving=gone,
        incoming=taken,
        columns=columns,
        replicas=replicas,
        cold=cold,
    )


def _rated_with(
    ctx: Context, job: ClusterJob, taken: Pairs, columns: tuple[int, ...]
) -> RatedNodes:
    """The nodes of a gang with others in some slots, and without some columns."""
    placement, shape = job.placement, job.spec.gang
    assert placement is not None
    slots = [slot for slot, _ in taken]
    for column in columns:
        slots.extend(column_slots(shape, placement.replicas, column))
    return rated(
        ctx,
        placement.nodes,
        without=[placement.nodes[slot] for slot in slots],
        incoming=[node for _, node in taken],
    )


def _shrunk(
    ctx: Context, job: ClusterJob, gone: tuple[int, ...], taken: Pairs, back_ns: int | None
) -> list[Option]:
    """Going on without the replicas that lost nodes, but for those that ``taken`` ones fill."""
    placement, shape = job.placement, job.spec.gang
    assert placement is not None
    together = column_replicas(shape, placement.replicas)
    if not together:
        return []
    filled = [slot for slot, _ in taken]
    slots = [placement.nodes.index(node) for node in gone]
    columns = tuple(
        dict.fromkeys(
            column_of(shape, placement.replicas, slot) for slot in slots if slot not in filled
        )
    )
    if placement.replicas - len(columns) * together < shape.floor:
        return []
    # A replacement inside a column that is cut out anyway would be wasted.
    useful = tuple(
        pair for pair in taken if column_of(shape, placement.replicas, pair[0]) not in columns
    )
    return [_reshaped(ctx, job, gone, useful, columns, back_ns)]


def _goes_on_without(
    ctx: Context, job: ClusterJob, gone: tuple[int, ...], replacements: Pairs
) -> list[Option]:
    """Shrinking at once, where replacements need long to start, and growing when they have."""
    allowed, expected = ctx.policy.recovery, job.expected
    if not allowed.shrink or gang_of(job).ending is not None:
        return []
    nodes = tuple(node for _, node in replacements)
    if expected.start_ns <= allowed.start_wait_ns or not can_stand_by(ctx, job, nodes):
        return []
    ways = _shrunk(ctx, job, gone, (), expected.start_ns)
    back = grown_pause_ns(ctx, job, as_it_is(ctx, job)) * ctx.ledger.accounts[job.id].gpus
    return [
        structs.replace(way, loss_gpu_ns=way.loss_gpu_ns + back, standing_by=nodes) for way in ways
    ]


def _remapped(
    ctx: Context, job: ClusterJob, gone: tuple[int, ...], missing_by_ns: int | None
) -> list[Option]:
    """Going on with another mapping until the missing nodes are there."""
    fallback = best_fallback(ctx, job, gone, missing_by_ns)
    if fallback is None:
        return []
    way = Option(
        rung=Rung.REMAP,
        loss_gpu_ns=fallback.loss_gpu_ns,
        leaving=gone,
        replicas=fallback.mapping.gang.replicas,
        fallback=fallback.mapping,
        nodes=fallback.nodes,
    )
    return [way]


def _waiting(
    ctx: Context, job: ClusterJob, gone: tuple[int, ...], missing_by_ns: int | None
) -> list[Option]:
    """Leaving, with all that the other nodes have in memory, until the missing ones are there."""
    gang, expected, placement = gang_of(job), job.expected, job.placement
    assert placement is not None
    most_ns = ctx.policy.recovery.wait_ns
    if missing_by_ns is None or missing_by_ns > most_ns or gang.ending is not None:
        return []
    if left_memory.keep(ctx, job) is None or not in_memory(gang, gone):
        return []
    gpus, on = job.spec.gang.gpus(placement.replicas), as_it_is(ctx, job)
    # Whoever fails meanwhile is waited for as well.
    again_ns = missing_by_ns * failures_ppm(on, gpus, missing_by_ns) // MILLION
    start_ns = expected.join_ns(cold=True) + expected.form_ns + expected.restore_peer_ns
    redo_ns = (job.step - job.committed) * step_ns(job)
    down = missing_by_ns + again_ns + through_ns(ctx, job, on, gpus, start_ns, redo_ns)
    return [Option(rung=Rung.WAIT, loss_gpu_ns=down * gpus, leaving=gone)]


def ways_without(ctx: Context, job: ClusterJob, nodes: tuple[int, ...], cause: str) -> list[Option]:
    """What a job can do that must be off some nodes some time from now, cheapest first."""
    gang = gang_of(job)
    without = structs.replace(gang, broken={**gang.broken, **dict.fromkeys(nodes, cause)})
    return options(ctx, structs.replace(job, gang=without), saves=True)


def _requeued(
    ctx: Context, job: ClusterJob, best: int | None, missing_by_ns: int | None, *, saves: bool
) -> Option:
    expected, shape, on = job.expected, job.spec.gang, as_it_is(ctx, job)
    gpus = shape.gpus(shape.replicas)
    start_ns = expected.start_ns + expected.form_ns + expected.restore_remote_ns
    saving = expected.checkpoint_ns + expected.flush_ns
    again_ns = saving if saves else (job.step - job.durable) * step_ns(job)
    down = through_ns(ctx, job, on, gpus, start_ns, again_ns) + ctx.policy.queue.delay_ns
    # Whether there is room elsewhere is worth finding out only if that could decide.
    if best is not None and down * gpus >= best - best // WORTH_LEAVING:
        return Option(rung=Rung.REQUEUE, loss_gpu_ns=max(best, down * gpus))
    placed = place(ctx.fleet, request_of(job, 0, ctx.policy))
    if isinstance(placed, PlacementRefusal):
        repair_ns = ctx.policy.recovery.repair_ns
        down += repair_ns if missing_by_ns is None else min(missing_by_ns, repair_ns)
        return Option(rung=Rung.REQUEUE, loss_gpu_ns=down * gpus)
    loss = down * gpus
    loss += to_come_gpu_ns(ctx, job, rated(ctx, placed.nodes), gpus, horizon_ns(ctx, job))
    if best is not None and loss >= best - best // WORTH_LEAVING:
        loss = max(best, loss)
    return Option(rung=Rung.REQUEUE, loss_gpu_ns=loss)


def slow_ways(
    ctx: Context, job: ClusterJob, node: int, cause: str, slowdown_ppm: int, slow_step_ns: int
) -> list[Option]:
    """What can be done about a slow node while the gang runs on, cheapest first.

    ``slow_step_ns``: a step with it; 0: nobody said, and steps were measured before it was slow.
    """
    assert job.placement is not None
    gpus, replicas = ctx.ledger.accounts[job.id].gpus, job.placement.replicas

    usual_ns = slow_step_ns * MILLION // (MILLION + slowdown_ppm) or step_ns(job)

    def lost(ppm: int) -> int:
        return gpus * slower_ns(ctx, job, ppm, usual_ns=usual_ns)

    ways = [Option(rung=Rung.DEGRADED, loss_gpu_ns=lost(slowdown_ppm), replicas=replicas)]
    if ctx.policy.recovery.rebalance and cause in (Cause.SLOW_COMPUTE, Cause.SLOW_HOST):
        shares, ppm = rebalanced(job, node, slowdown_ppm)
        if shares:
            way = Option(
                rung=Rung.REBALANCE, loss_gpu_ns=lost(ppm), replicas=replicas, micro_batches=shares
            )
            ways.append(way)
    ways.extend(_swapped(ctx, job, node))
    return sorted(ways, key=lambda option: option.loss_gpu_ns)


def degraded_ways(ctx: Context, job: ClusterJob, node: int) -> list[Option]:
    """What can be done about a node with dead rails; []: it has no network left."""
    assert job.placement is not None
    rails, down = ctx.fleet.nodes[node].rails, ctx.fleet.rails_down(node)
    left = rails - down.bit_count()
    if left <= 0 or not ctx.policy.recovery.degraded:
        return []
    exposed = waiting_parts_ns(job)[0] * (rails - left) // left
    others = (other for other in job.placement.nodes if other != node)
    worst = max((ctx.fleet.rails_down(other).bit_count() for other in others), default=0)
    # The gang is as slow as its slowest node: a second one as bad costs nothing more.
    gpus = ctx.ledger.accounts[job.id].gpus
    slower = slower_ns(ctx, job, MILLION * exposed // step_ns(job))
    loss = 0 if worst >= rails - left else gpus * slower
    found = [Option(rung=Rung.DEGRADED, loss_gpu_ns=loss, replicas=job.placement.replicas)]
    found.extend(_swapped(ctx, job, node))
    return sorted(found, key=lambda option: option.loss_gpu_ns)


def _swapped(ctx: Context, job: ClusterJob, node: int) -> list[Option]:
    if not ctx.policy.recovery.swap:
        return []
    found = incoming(ctx, job, (node,))
    return [_reshaped(ctx, job, (node,), found, ())] if found else []
