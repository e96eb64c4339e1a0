"""The fleet's own spares: filled, lent to who cannot start without them, out of open windows."""

from __future__ import annotations

import numpy as np
from msgspec import structs

from phalanx.cluster.context import Context
from phalanx.cluster.fleet import time_away
from phalanx.cluster.fleet.spares import is_full, spare_nodes, wanted_spares
from phalanx.cluster.gang import node_rates
from phalanx.cluster.gang.orders import stop_on
from phalanx.cluster.gang.phases import gang_of
from phalanx.cluster.jobs.lifecycle import drop_spare
from phalanx.cluster.node import NodeState
from phalanx.cluster.placement.free_index import free_index_of
from phalanx.cluster.policy import DAY_NS, SparePolicy
from phalanx.cluster.reasons import reason, span_of
from phalanx.cluster.units import MILLION


def fill_pool(ctx: Context) -> None:
    """Keeps the fleet's own spares at the number that the policy wants."""
    policy = _policy(ctx)
    if not policy.nodes:
        return
    if is_full(ctx.fleet, policy):
        _give_back(ctx, policy)
        return
    closed = ctx.queue.closed_to(ctx.view, None)
    left = _beyond_need(ctx)
    for node in spare_nodes(ctx.fleet, policy, closed):
        if ctx.fleet.state(node) is not NodeState.HEALTHY or ctx.fleet.held[node]:
            continue
        kind = int(ctx.fleet.columns.node_class[node])
        using = [classes for classes in left if kind in classes]
        if all(left[classes] > 0 for classes in using):
            for classes in using:
                left[classes] -= 1
            ctx.fleet.set_state(node, NodeState.SPARE, ctx.now_ns, reason("spare_of_fleet"))


def follow_rate(ctx: Context) -> None:
    """Has the spares follow how often nodes fail, where the policy wants that, and says why."""
    if ctx.policy.spares.nodes >= 0 or ctx.policy.spares.down_ppm:
        return
    before = wanted_spares(ctx.fleet, _policy(ctx))
    away_ns = time_away.usual_ns(ctx)
    ctx.health.down_ppm = node_rates.down_ppm(ctx, away_ns)
    now = wanted_spares(ctx.fleet, _policy(ctx))
    if now != before:
        down = f"{ctx.health.down_ppm // 10_000}.{ctx.health.down_ppm % 10_000 // 100:02}"
        away = span_of(away_ns)
        ctx.notify(reason("spares_follow", before=before, nodes=now, percent=down, away=away))
        ctx.look_at_queue(capacity=True)


def _policy(ctx: Context) -> SparePolicy:
    """What is kept free, with the chance of a node to be away that is known now."""
    policy = ctx.policy.spares
    if policy.nodes >= 0 or policy.down_ppm:
        return policy
    prior = ctx.policy.health.failures_per_million_node_days * ctx.policy.recovery.repair_ns
    down = ctx.health.down_ppm or min(MILLION - 1, max(1, prior // DAY_NS))
    return structs.replace(policy, down_ppm=down)


def _give_back(ctx: Context, policy: SparePolicy) -> None:
    """Spares that are more than the fleet needs now are for everybody."""
    columns = ctx.fleet.columns
    pool = np.flatnonzero((columns.state == NodeState.SPARE) & (columns.spare_for == 0)).tolist()
    if policy.nodes >= 0 or len(pool) <= wanted_spares(ctx.fleet, policy):
        return
    kept = dict.fromkeys(spare_nodes(ctx.fleet, policy))
    for node in pool:
        if node not in kept:
            why = reason("spare_not_needed")
            ctx.fleet.set_state(node, NodeState.HEALTHY, ctx.now_ns, why)


def _beyond_need(ctx: Context) -> dict[tuple[int, ...], int]:
    """By classes of nodes that some waiting jobs can use: how many are more than one needs.

    Of the jobs that can use the same nodes the largest counts; below 0: it would lack some even
    if everything else ended.
    """
    free_index, kinds = free_index_of(ctx.fleet), len(ctx.fleet.classes)
    ctx.queue.sync(ctx.view)
    needed: dict[tuple[int, ...], int] = {}
    for group in ctx.queue.waiting.groups.values():
        classes = group.suiting(free_index, kinds)
        needed[classes] = max(needed.get(classes, 0), group.least_slots)
    return {
        classes: free_index.sound(classes).bit_count() - count for classes, count in needed.items()
    }


def lend_pool(ctx: Context) -> None:
    """Gives pool spares up for a job that cannot start without them: they are there to be used."""
    if not ctx.policy.spares.nodes or not ctx.view.pending:
        return
    columns = ctx.fleet.columns
    pool = np.flatnonzero((columns.state == NodeState.SPARE) & (columns.spare_for == 0)).tolist()
    needs = _beyond_need(ctx) if pool else {}
    lacking = {classes: -left for classes, left in needs.items() if left < 0}
    for node in pool if lacking else ():
        kind = int(columns.node_class[node])
        using = [classes for classes, count in lacking.items() if kind in classes and count > 0]
        if using:
            for classes in using:
                lacking[classes] -= 1
            ctx.fleet.set_state(node, NodeState.HEALTHY, ctx.now_ns, reason("lent"))


def clear_windows(ctx: Context) -> None:
    """Nodes of windows that have opened stand by no more, but for jobs that may be there."""
    if not ctx.view.reservations:
        return
    shut = {"": ctx.queue.windows.open_now(ctx.view, "")}
    spares = ctx.fleet.columns.state == NodeState.SPARE
    for node in np.flatnonzero(spares).tolist() if shut[""] else ():
        owner = ctx.fleet.spare_for(node)
        job = ctx.view.jobs[owner] if owner else None
        team = job.spec.team if job else ""
        if team not in shut:
            shut[team] = ctx.queue.windows.open_now(ctx.view, team)
        if not shut[team] >> node & 1:
            continue
        ctx.fleet.set_state(node, NodeState.HEALTHY, ctx.now_ns, reason("spare_in_window"))
        if job is not None:
            drop_spare(ctx, job, node)
            stop_on(ctx, job, (node,), keep_snapshots=gang_of(job).phase != "running")
