"""Nodes that fail alike: of one age, and that failed as often before.

A node is as old as it is in the fleet, or repaired: young ones fail more often, and so do those
that failed already. Time that gangs run, and failures, are counted by these groups. A node whose
beginning nobody saw is old.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

from phalanx.cluster.context import Context, FailureDay
from phalanx.cluster.jobs.job import SECOND_NS, Gang
from phalanx.cluster.policy import DAY_NS

YOUNG = {"first day": DAY_NS, "first week": 7 * DAY_NS, "first month": 30 * DAY_NS}  # up to
MATURE_NS = max(YOUNG.values())
OLDER = "older"
AGES = (*YOUNG, OLDER)
FAILED = ("", ", failed once", ", failed more often")  # within the policy's window
AGE_OF = {age + often: age for age in AGES for often in FAILED}  # by group
GROUPS = tuple(AGE_OF)


def begins(ctx: Context, node: int) -> None:
    """A node is new: it joined, or was repaired."""
    ctx.health.in_service[node] = ctx.now_ns
    ctx.node_rates = None


def fails(ctx: Context, node: int) -> None:
    """A node interrupted a gang: from now on it is one that did so."""
    ctx.health.failed.setdefault(node, []).append(ctx.now_ns // DAY_NS)
    ctx.node_rates = None


def group_of(ctx: Context, node: int) -> str:
    """The group that a node belongs to now."""
    return _age_of(ctx, node) + _failed_before(ctx, node)


def groups_of(ctx: Context, nodes: Sequence[int]) -> dict[str, dict[str, int]]:
    """How many of some nodes are of each kind and group."""
    known = ctx.fleet.nodes
    found = {kind: {OLDER: n} for kind, n in Counter(known[node].kind for node in nodes).items()}
    for node in _among(ctx.health.in_service.keys() | ctx.health.failed.keys(), nodes):
        group, of_kind = group_of(ctx, node), found[known[node].kind]
        of_kind[OLDER] -= 1
        of_kind[group] = of_kind.get(group, 0) + 1
    return {
        kind: {group: number for group, number in numbers.items() if number}
        for kind, numbers in found.items()
    }


def _among(marked: Collection[int], nodes: Sequence[int]) -> list[int]:
    """Those nodes that are marked, in the order of ``nodes``; few marked ones cost little."""
    common = set(marked).intersection(nodes)
    return [node for node in nodes if node in common] if common else []


def _age_of(ctx: Context, node: int) -> str:
    since_ns = ctx.health.in_service.get(node)
    if since_ns is None:
        return OLDER
    return next((age for age, upto in YOUNG.items() if ctx.now_ns < since_ns + upto), OLDER)


def _failed_before(ctx: Context, node: int) -> str:
    return FAILED[min(len(ctx.health.failed.get(node, ())), len(FAILED) - 1)]


def count_time(ctx: Context, gang: Gang, gpus: int, today: Callable[[str], FailureDay]) -> None:
    """Adds the time that a gang has run since it was last counted to the groups of its nodes.

    ``today``: the day of a kind of nodes.
    """
    begin_ns, gang.aged_ns = max(gang.aged_ns, gang.since_ns), ctx.now_ns
    groups = gang.node_groups or groups_of(ctx, gang.keepers)
    passed_ns: dict[tuple[str, str], int] = {}
    aging = False
    for kind, numbers in groups.items():
        for group, number in numbers.items():
            if group.startswith(OLDER):
                passed_ns[kind, group] = number * (ctx.now_ns - begin_ns)
            else:
                aging = True
    for node in _among(ctx.health.in_service, gang.keepers) if aging else ():
        since_ns = ctx.health.in_service[node]
        if since_ns + MATURE_NS <= begin_ns:
            continue  # it is counted with those that are older
        kind, often = ctx.fleet.nodes[node].kind, _failed_before(ctx, node)
        for age, part_ns in _parts(since_ns, begin_ns, ctx.now_ns):
            known_ns = passed_ns.get((kind, age + often), 0)
            passed_ns[kind, age + often] = known_ns + part_ns
    for (kind, group), part_ns in passed_ns.items():
        seconds = part_ns * gpus // (len(gang.keepers) * SECOND_NS)
        if seconds > 0:
            counted = today(kind).aged_gpu_seconds
            counted[group] = counted.get(group, 0) + seconds


def forget_old(ctx: Context) -> None:
    """Nodes that are past all ages are old like those whose beginning nobody saw.

    Failures that are older than the policy's window are forgotten.
    """
    last_ns, young = ctx.now_ns - MATURE_NS, ctx.health.in_service
    for node in [node for node, since_ns in young.items() if since_ns < last_ns]:
        if not ctx.fleet.held[node]:  # a gang that runs there is still to be counted
            del young[node]
    first, failed = (ctx.now_ns - ctx.policy.health.failure_window_ns) // DAY_NS, ctx.health.failed
    for node in [node for node, days in failed.items() if days[0] < first]:
        failed[node] = [day for day in failed[node] if day >= first]
        if not failed[node]:
            del failed[node]
    ctx.node_rates = None


def _parts(since_ns: int, begin_ns: int, end_ns: int) -> Iterator[tuple[str, int]]:
    """How long a node was of each age within a time."""
    low_ns = since_ns
    for age in AGES:
        high_ns = since_ns + YOUNG[age] if age in YOUNG else max(end_ns, low_ns)
        part_ns = min(end_ns, high_ns) - max(begin_ns, low_ns)
        if part_ns > 0:
            yield age, part_ns
        low_ns = high_ns
