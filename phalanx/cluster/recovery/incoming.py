"""Nodes that could come into a gang: which ones, which of them have workers, and why these.

Pure: reads the state, changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from phalanx.cluster.context import Context
from phalanx.cluster.gang.node_rates import rates_of
from phalanx.cluster.gang.phases import gang_of
from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.placement.free_index import array_of
from phalanx.cluster.placement.replacements import NodePrices, Wanted, replacements
from phalanx.cluster.placement.request import request_of
from phalanx.cluster.reasons import Reason, reason
from phalanx.cluster.recovery.prices import node_prices

Pairs = tuple[tuple[int, int], ...]  # (slot, node that takes it)


def warm_from_ns(ctx: Context, job: ClusterJob, node: int) -> int:
    """When a spare of a job has workers that wait.

    Nodes of a replica that was cut out had them all the time; others start them when they come.
    """
    since_ns = ctx.fleet.since_ns(node)
    had = gang_of(job).stood_by.get(node) == since_ns
    return since_ns if had else since_ns + job.expected.start_ns


def is_warm(ctx: Context, job: ClusterJob, node: int) -> bool:
    """Whether a node has workers of a job that wait."""
    mine = ctx.fleet.spare_for(node) == job.id
    return mine and warm_from_ns(ctx, job, node) <= ctx.now_ns


def can_stand_by(ctx: Context, job: ClusterJob, nodes: Sequence[int]) -> bool:
    """Whether nodes could be spares of a job: nothing runs there, and a slot takes all of one."""
    shape, fleet = job.spec.gang, ctx.fleet
    whole = shape.whole_nodes or all(fleet.nodes[n].gpus == shape.slot_gpus for n in nodes)
    return whole and not any(fleet.held[node] for node in nodes)


def incoming(ctx: Context, job: ClusterJob, gone: tuple[int, ...]) -> Pairs:
    """Replacements for as many slots as there are nodes for, by what they would cost."""
    return _chosen(ctx, job, gone, node_prices(ctx, job))


def safer(ctx: Context, job: ClusterJob, gone: tuple[int, ...], taken: Pairs) -> list[Reason]:
    """Why some nodes come in, where others would if all failed alike."""
    usual = dict(_chosen(ctx, job, gone, None)) if taken else {}
    reasons = []
    for slot, node in taken:
        other = usual.get(slot, node)
        if other != node and other not in [each for _, each in taken]:
            rates = rates_of(ctx, (node, other))
            facts = [f"{rate // 1000}.{rate % 1000 // 10:02}" for rate in rates]
            names = ctx.fleet.nodes[node].name, ctx.fleet.nodes[other].name
            reasons.append(
                reason("safer", node=names[0], other=names[1], rate=facts[0], other_rate=facts[1])
            )
    return reasons


def _chosen(
    ctx: Context, job: ClusterJob, gone: tuple[int, ...], prices: NodePrices | None
) -> Pairs:
    placement = job.placement
    assert placement is not None
    shut = ctx.queue.shut_now(ctx.view, job)  # spares stand by there until the window opens
    request = structs.replace(
        request_of(job, placement.replicas, ctx.policy),
        keep=placement.nodes,
        avoid=tuple(array_of(shut, len(ctx.fleet)).tolist()),
        closed=ctx.queue.kept_from(ctx.view, job),
        warm=tuple(node for node in placement.spares if is_warm(ctx, job, node)),
        backup=gang_of(job).backup,
    )
    wanted = [_wanted(job, placement.nodes.index(node)) for node in gone]
    return replacements(ctx.fleet, request, wanted, prices)


def _wanted(job: ClusterJob, slot: int) -> Wanted:
    """A slot, and the nodes that keep its snapshot, or whose snapshot it keeps."""
    assert job.placement is not None
    nodes, shift = job.placement.nodes, gang_of(job).buddy_shift
    if not shift:
        return slot, ()
    return slot, (nodes[(slot + shift) % len(nodes)], nodes[(slot - shift) % len(nodes)])
