"""Nodes that fail alike: of one age, and that failed as often before.

A node is as old as it is in the fleet, or repaired: young ones fail more often, and so do those
that failed already. Time that gangs run, and failures, are counted by these groups. A node whose
beginning nobody saw is old.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from phalanx.cluster.context import Context, FailureDay
from phalanx.cluster.jobs.job import Gang
from phalanx.cluster.policy import DAY_NS
from phalanx.cluster.units import SECOND_NS

NodeColumn = NDArray[np.int64]  # a number for each node

YOUNG = {"first day": DAY_NS, "first week": 7 * DAY_NS, "first month": 30 * DAY_NS}  # up to
MATURE_NS = max(YOUNG.values())
UNSEEN_NS = -(1 << 62)  # the beginning of a node that nobody saw: long ago
OLDER = "older"
AGES = (*YOUNG, OLDER)
FEW_NODES = 64  # are counted one by one rather than in columns of the whole fleet
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
    since_ns = ctx.health.in_service.get(node)
    ages = AGES if since_ns is not None else (OLDER,)
    lived_ns = ctx.now_ns - since_ns if since_ns is not None else 0
    age = next(age for age in ages if age == OLDER or lived_ns < YOUNG[age])
    return age + FAILED[min(len(ctx.health.failed.get(node, ())), len(FAILED) - 1)]


def group_numbers(ctx: Context) -> NodeColumn:
    """Of every node of the fleet: its group's place in ``GROUPS``."""
    young, numbers = ctx.health.in_service, np.full(len(ctx.fleet), GROUPS.index(OLDER), np.int64)
    lived_ns = ctx.now_ns - np.fromiter(young.values(), np.int64, len(young))
    ages = np.searchsorted(list(YOUNG.values()), lived_ns, side="right")
    numbers[np.fromiter(young, np.int64, len(young))] = ages * len(FAILED)
    for node, days in ctx.health.failed.items():
        numbers[node] += min(len(days), len(FAILED) - 1)
    return numbers


def groups_of(ctx: Context, nodes: Sequence[int]) -> dict[str, dict[str, int]]:
    """How many of some nodes are of each kind and group."""
    if len(nodes) <= FEW_NODES:
        names = Counter((ctx.fleet.nodes[node].kind, group_of(ctx, node)) for node in nodes)
        few: dict[str, dict[str, int]] = {}
        for (kind, group), number in names.items():
            few.setdefault(kind, {})[group] = number
        return few
    chosen, classes = np.asarray(nodes, np.int64), ctx.fleet.columns.node_class
    places = classes[chosen] * len(GROUPS) + group_numbers(ctx)[chosen]
    numbers: dict[str, dict[str, int]] = {}
    seen, counts = np.unique(places, return_counts=True)
    for place, number in zip(seen.tolist(), counts.tolist(), strict=True):
        of_kind = numbers.setdefault(ctx.fleet.classes[place // len(GROUPS)].kind, {})
        group = GROUPS[place % len(GROUPS)]
        of_kind[group] = of_kind.get(group, 0) + number
    return numbers


def count_time(ctx: Context, gang: Gang, gpus: int, today: Callable[[str], FailureDay]) -> None:
    """Adds the time that a gang has run since it was last counted to the groups of its nodes.

    ``today``: the day of a kind of nodes.
    """
    begin_ns, gang.aged_ns = max(gang.aged_ns, gang.since_ns), ctx.now_ns
    groups = gang.node_groups or groups_of(ctx, gang.keepers)
    passed_ns: dict[tuple[str, str], int] = {}
    aging = False
    for node_kind, numbers in groups.items():
        for group, number in numbers.items():
            if group.startswith(OLDER):
                passed_ns[node_kind, group] = number * (ctx.now_ns - begin_ns)
            else:
                aging = True
    if aging:
        passed_ns |= _aging_ns(ctx, gang, begin_ns)
    for (node_kind, group), part_ns in passed_ns.items():
        seconds = part_ns * gpus // (len(gang.keepers) * SECOND_NS)
        if seconds > 0:
            counted = today(node_kind).aged_gpu_seconds
            counted[group] = counted.get(group, 0) + seconds


def _aging_ns(ctx: Context, gang: Gang, begin_ns: int) -> dict[tuple[str, str], int]:
    """The time that nodes which are not old, or became it since, ran; by kind and group."""
    fleet, keepers = ctx.fleet, np.asarray(gang.keepers, np.int64)
    begun = map(ctx.health.in_service.get, gang.keepers, repeat(UNSEEN_NS))
    begun_ns = np.fromiter(begun, np.int64, len(keepers))
    aging = begun_ns + MATURE_NS > begin_ns  # others count as older ones
    nodes, since_ns = keepers[aging], begun_ns[aging]
    times = np.zeros(len(fleet), np.int64)
    for node, days in ctx.health.failed.items():
        times[node] = min(len(days), len(FAILED) - 1)
    alike = fleet.columns.node_class[nodes] * len(FAILED) + times[nodes]
    aging_ns: dict[tuple[str, str], int] = {}
    for place in np.unique(alike).tolist():
        node_kind, often = fleet.classes[place // len(FAILED)].kind, FAILED[place % len(FAILED)]
        for age, part_ns in _parts(since_ns[alike == place], begin_ns, ctx.now_ns):
            if part_ns:
                aging_ns[node_kind, age + often] = (
                    aging_ns.get((node_kind, age + often), 0) + part_ns
                )
    return aging_ns


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


def _parts(since_ns: NodeColumn, begin_ns: int, end_ns: int) -> Iterator[tuple[str, int]]:
    """How long nodes were of each age within a time, together."""
    low_ns = since_ns
    for age in AGES:
        high_ns = since_ns + YOUNG[age] if age in YOUNG else np.maximum(end_ns, low_ns)
        parts_ns = np.minimum(end_ns, high_ns) - np.maximum(begin_ns, low_ns)
        yield age, _total(np.maximum(parts_ns, 0))
        low_ns = high_ns


def _total(column: NodeColumn) -> int:
    """The exact sum: nanoseconds of a large gang may not fit into 64 bits."""
    return (int((column >> 32).sum()) << 32) + int((column & 0xFFFFFFFF).sum())
