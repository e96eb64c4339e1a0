"""How long nodes stay away, by what took them: as it was seen, and as it is expected.

Times are those from the last moment at which a node could be given work until it can be again. Of
a cause that was seen a few times the mean counts, with the time that others have been away for it
so far: who is not back yet must not be left out. Before that it is the policy's ``repair_ns``.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from phalanx.cluster.context import Context, SeenReturns
from phalanx.cluster.node import NodeState

FEW = 3  # returns that say little of the next one
USABLE = (NodeState.HEALTHY, NodeState.SPARE)
COMES_BACK = (NodeState.SUSPECT, NodeState.QUARANTINED, NodeState.DEAD)


def came_back(ctx: Context, node: int) -> None:
    """A node is about to be given work again: how long that took is remembered."""
    left = _left(ctx, node)
    if left is not None:
        cause, since_ns = left
        known = ctx.health.returns.setdefault(cause, SeenReturns())
        known.count += 1
        known.away_ns += ctx.now_ns - since_ns


def away(ctx: Context) -> list[int]:
    """Nodes that are not usable now and may be again."""
    return np.flatnonzero(np.isin(ctx.fleet.columns.state, COMES_BACK)).tolist()


def expected_ns(ctx: Context, nodes: Iterable[int], count: int) -> int | None:
    """Until so many of some nodes that are away are back; None: they are fewer.

    Returns are taken to come at random: those of many nodes follow each other the sooner.
    """
    causes: dict[str, list[int]] = {}  # how long each has been away so far
    for node in nodes:
        left = _left(ctx, node)
        cause, since_ns = left or ("", ctx.now_ns)
        causes.setdefault(cause, []).append(ctx.now_ns - since_ns)
    if sum(map(len, causes.values())) < count:
        return None
    usual_ns, per_usual = max(1, ctx.policy.recovery.repair_ns), 0
    for cause, passed in causes.items():
        returned = ctx.health.returns.get(cause)
        mean_ns = usual_ns
        if returned is not None and returned.count >= FEW:
            mean_ns = max(1, (returned.away_ns + sum(passed)) // returned.count)
        # Returns of these within the usual time, in thousandths.
        per_usual += len(passed) * usual_ns * 1000 // mean_ns
    return count * usual_ns * 1000 // max(1, per_usual)


def usual_ns(ctx: Context) -> int:
    """How long a node stays away on average; the policy's ``repair_ns`` counts as one return."""
    seen = ctx.health.returns.values()
    total_ns = ctx.policy.recovery.repair_ns + sum(each.away_ns for each in seen)
    return total_ns // (1 + sum(each.count for each in seen))


def _left(ctx: Context, node: int) -> tuple[str, int] | None:
    """Why and since when a node gets no work; None: nobody remembers."""
    departure = None
    for change in reversed(ctx.fleet.history.get(node, ())):
        if change.state in USABLE:
            break
        departure = change
    if departure is None:
        return None
    return str(departure.reason.facts.get("cause", departure.reason.code)), departure.time_ns
