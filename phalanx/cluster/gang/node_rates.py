"""How often nodes fail: each by its kind, its age and whether it failed before.

What a gang expects is the mean of its own nodes. What was worked out is kept until something is
counted, or the event is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from phalanx.cluster.context import Context, NodeRates
from phalanx.cluster.gang import risk_groups
from phalanx.cluster.gang.seen_failures import NODE_GPUS, SeenFailures, seen_of
from phalanx.cluster.policy import DAY_NS
from phalanx.cluster.units import MILLION


def of_groups(ctx: Context, node_kind: str) -> dict[str, int]:
    """The rate of nodes of a kind, by group."""
    tables = _worked_out(ctx).by_kind
    if node_kind not in tables:
        groups = seen_now(ctx, node_kind).groups
        tables[node_kind] = {group: each.per_million_node_days for group, each in groups.items()}
    return tables[node_kind]


def seen_now(ctx: Context, node_kind: str) -> SeenFailures:
    """What is known of a kind of node; many jobs are told of it at a time."""
    seen_by_kind = _worked_out(ctx).seen
    if node_kind not in seen_by_kind:
        seen_by_kind[node_kind] = seen_of(node_kind, ctx.health, ctx.policy.health, ctx.now_ns)
    seen: SeenFailures = seen_by_kind[node_kind]
    return seen


class RatedNodes(Struct, frozen=True):
    """Nodes of a gang as its failures go by them."""

    count: int
    rate: int  # their mean


def rated(
    ctx: Context,
    nodes: tuple[int, ...],
    *,
    without: Sequence[int] = (),
    incoming: Sequence[int] = (),
) -> RatedNodes:
    """Some nodes, without a few of them and with a few others."""
    totals, rates = _worked_out(ctx).totals, _of_all(ctx)
    if nodes not in totals:
        totals[nodes] = int(rates[list(nodes)].sum())
    total = totals[nodes] - sum(rates[list(without)].tolist()) + sum(rates[list(incoming)].tolist())
    count = len(nodes) - len(without) + len(incoming)
    return RatedNodes(count, max(1, total // max(1, count)))


def rates_of(ctx: Context, nodes: Sequence[int]) -> list[int]:
    """The rate of each of some nodes."""
    found: list[int] = _of_all(ctx)[list(nodes)].tolist()
    return found


def mean_of_groups(ctx: Context, groups: dict[str, dict[str, int]]) -> int:
    """The mean rate of so many nodes of each kind and group."""
    total, count, rates = 0, 0, _worked_out(ctx).of_group
    for node_kind, numbers in groups.items():
        for group, number in numbers.items():
            if (node_kind, group) not in rates:
                rates[node_kind, group] = (
                    seen_now(ctx, node_kind).group(group).per_million_node_days
                )
            total, count = total + number * rates[node_kind, group], count + number
    return max(1, total // max(1, count))


def down_ppm(ctx: Context, away_ns: int) -> int:
    """Chance of a node to be away at a moment. ``away_ns``: how long one stays away."""
    total = int((ctx.fleet.columns.gpus * _of_all(ctx)).sum())
    mean = total // (NODE_GPUS * max(1, len(ctx.fleet)))  # of a node, per million days
    return max(1, min(MILLION - 1, mean * away_ns // DAY_NS))


def _worked_out(ctx: Context) -> NodeRates:
    cached = ctx.node_rates
    if cached is None or (cached.sequence, cached.now_ns) != (ctx.sequence, ctx.now_ns):
        cached = ctx.node_rates = NodeRates(sequence=ctx.sequence, now_ns=ctx.now_ns)
    return cached


def by_node(ctx: Context, priced: Callable[[int], int]) -> NDArray[np.int64]:
    """What a function of its rate gives for every node; it is asked once a kind and group."""
    fleet, tables = ctx.fleet, [of_groups(ctx, each.kind) for each in ctx.fleet.classes]
    values = np.asarray(
        [[priced(rates[group]) for group in risk_groups.GROUPS] for rates in tables], np.int64
    ).reshape(len(tables), len(risk_groups.GROUPS))
    found: NDArray[np.int64] = values[fleet.columns.node_class, _group_numbers(ctx)]
    return found


def _of_all(ctx: Context) -> NDArray[np.int64]:
    """The rate of every node of the fleet."""
    cached = _worked_out(ctx)
    if cached.of_nodes is None or len(cached.of_nodes) != len(ctx.fleet):
        cached.of_nodes = by_node(ctx, lambda rate: rate)
    return cached.of_nodes


def _group_numbers(ctx: Context) -> NDArray[np.int64]:
    """The group of every node of the fleet, by its place among all groups."""
    cached = _worked_out(ctx)
    if cached.groups is None or len(cached.groups) != len(ctx.fleet):
        cached.groups = risk_groups.group_numbers(ctx)
    return cached.groups
