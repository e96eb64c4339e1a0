"""How old nodes are: since they joined the fleet, or were repaired. Young ones fail more often.

Time that gangs run, and failures, are counted by age. A node whose beginning nobody saw is old.
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.cluster.context import Context, FailureDay
from phalanx.cluster.jobs.job import SECOND_NS, Gang
from phalanx.cluster.policy import DAY_NS

YOUNG = {"first day": DAY_NS, "first week": 7 * DAY_NS, "first month": 30 * DAY_NS}  # up to
OLDER = "older"
AGES = (*YOUNG, OLDER)


def begins(ctx: Context, node: int) -> None:
    """A node is new: it joined, or was repaired."""
    ctx.health.in_service[node] = ctx.now_ns


def age_of(ctx: Context, node: int) -> str:
    """The age that a node has now."""
    since_ns = ctx.health.in_service.get(node)
    if since_ns is None:
        return OLDER
    return next((age for age, upto in YOUNG.items() if ctx.now_ns < since_ns + upto), OLDER)


def count_time(ctx: Context, gang: Gang, gpus: int, day: FailureDay) -> None:
    """Adds the time that a gang has run, since it was last counted, to the ages of its nodes."""
    begin_ns, gang.aged_ns = max(gang.aged_ns, gang.since_ns), ctx.now_ns
    known, old, passed_ns = ctx.health.in_service, 0, dict.fromkeys(AGES, 0)
    for node in gang.keepers:
        since_ns = known.get(node)
        if since_ns is None:
            old += 1
            continue
        for age, part_ns in _parts(since_ns, begin_ns, ctx.now_ns):
            passed_ns[age] += part_ns
    passed_ns[OLDER] += old * (ctx.now_ns - begin_ns)
    for age, part_ns in passed_ns.items():
        if part_ns > 0:
            seconds = part_ns * gpus // (len(gang.keepers) * SECOND_NS)
            day.aged_gpu_seconds[age] = day.aged_gpu_seconds.get(age, 0) + seconds


def forget_old(ctx: Context) -> None:
    """Nodes that are past all ages are old like those whose beginning nobody saw."""
    last_ns = ctx.now_ns - max(YOUNG.values())
    known = ctx.health.in_service
    for node in [node for node, since_ns in known.items() if since_ns < last_ns]:
        if not ctx.fleet.held[node]:  # a gang that runs there is still to be counted
            del known[node]


def _parts(since_ns: int, begin_ns: int, end_ns: int) -> Iterator[tuple[str, int]]:
    """How long a node was of each age within a time."""
    low_ns = since_ns
    for age in AGES:
        high_ns = since_ns + YOUNG[age] if age in YOUNG else max(end_ns, low_ns)
        part_ns = min(end_ns, high_ns) - max(begin_ns, low_ns)
        if part_ns > 0:
            yield age, part_ns
        low_ns = high_ns
