"""Counts what interrupts gangs, and tells those that run how often their own nodes fail.

Only what speaks of a node counts: not a person's mistake or plan, nor a signal, with which one
program could change everybody's interval.
"""

from __future__ import annotations

from phalanx.cluster.causes import Cause
from phalanx.cluster.context import Context, FailureDay, KindFailures
from phalanx.cluster.gang import node_rates, risk_groups
from phalanx.cluster.jobs.job import ClusterJob, Gang
from phalanx.cluster.policy import DAY_NS
from phalanx.cluster.protocol.commands import FailureRate
from phalanx.cluster.reasons import reason
from phalanx.cluster.units import MILLION, SECOND_NS

TOLD_AGAIN_PPM = 100_000  # gangs are told of a rate that changed by more than this
PLANNED = (Cause.HOST_MAINTENANCE, Cause.NODE_CHANGED)


def begins_to_run(ctx: Context, job: ClusterJob, gang: Gang) -> None:
    """A gang runs from now on; its new workers hear of a rate that is not the policy's."""
    assert job.placement is not None
    kind = ctx.fleet.nodes[job.placement.nodes[0]].kind
    gang.runs_on = kind, job.spec.gang.gpus(job.placement.replicas)
    gang.node_groups = risk_groups.groups_of(ctx, job.placement.nodes)
    for each, gpus in _by_kind(gang, *gang.runs_on).items():
        known = ctx.health.failures.setdefault(each, KindFailures())
        known.running_gpus += gpus
        known.running_gpu_ns += gpus * ctx.now_ns
    ctx.node_rates = None
    if not _tell(ctx, job) and gang.told_rate:
        _order(ctx, job)
    if not ctx.health.failures_look_ns:
        _look_tomorrow(ctx)


def ends_running(ctx: Context, gang: Gang) -> str | None:
    """The gang stops, for whatever reason; the kind of its nodes. None: it did not run."""
    if gang.runs_on is None:
        return None
    (node_kind, gpus), gang.runs_on = gang.runs_on, None
    for each, group_gpus in _by_kind(gang, node_kind, gpus).items():
        known = ctx.health.failures[each]
        known.running_gpus -= group_gpus
        known.running_gpu_ns -= group_gpus * gang.since_ns
        _today(ctx, each).gpu_seconds += (ctx.now_ns - gang.since_ns) * group_gpus // SECOND_NS
    _count_groups(ctx, gang, gpus)
    gang.node_groups = {}
    return node_kind


def interrupted(ctx: Context, node_kind: str, cause: str, node: int) -> None:
    """What interrupted a gang that ran is known: it counts.

    ``node_kind``: of its nodes, where nobody knows which of them it was (``node``: -1).
    """
    if Cause.of(cause).node == "keep" or cause in PLANNED:
        return
    node_kind = ctx.fleet.nodes[node].kind if node >= 0 else node_kind
    day = _today(ctx, node_kind)
    day.causes[cause] = day.causes.get(cause, 0) + 1
    if node >= 0:
        group = risk_groups.group_of(ctx, node)
        day.aged_failures[group] = day.aged_failures.get(group, 0) + 1
        risk_groups.fails(ctx, node)
    ctx.node_rates = None
    if not _has_moved(ctx, node_kind):
        return  # a storm of failures: not every job is looked at for each
    for job in _running(ctx):
        if job.gang is not None and node_kind in job.gang.node_groups:
            _tell(ctx, job)


def look_again(ctx: Context) -> None:
    """A day has passed: without failures rates fall, and nodes have become older."""
    ctx.health.failures_look_ns = 0
    running = _running(ctx)
    for job in running:
        assert job.gang is not None and job.gang.runs_on is not None
        _count_groups(ctx, job.gang, job.gang.runs_on[1])
    risk_groups.forget_old(ctx)
    for job in running:
        assert job.gang is not None
        job.gang.node_groups = risk_groups.groups_of(ctx, job.gang.keepers)
        _tell(ctx, job)
    if ctx.view.active:
        _look_tomorrow(ctx)


def _has_moved(ctx: Context, node_kind: str) -> bool:
    """Whether jobs on nodes of a kind may have to be told: a rate is another one than it was."""
    failures, prior = (
        ctx.health.failures[node_kind],
        ctx.policy.health.failures_per_million_node_days,
    )
    rates, before = node_rates.of_groups(ctx, node_kind), failures.looked_at
    moved = any(
        abs(rate - before.get(group, prior)) * MILLION > before.get(group, prior) * TOLD_AGAIN_PPM
        for group, rate in rates.items()
    )
    if moved:
        failures.looked_at = dict(rates)
    return moved


def _running(ctx: Context) -> list[ClusterJob]:
    jobs = map(ctx.view.jobs.__getitem__, ctx.view.active)
    return [job for job in jobs if job.gang is not None and job.gang.runs_on is not None]


def _by_kind(gang: Gang, first_kind: str, gpus: int) -> dict[str, int]:
    """GPUs of a gang by the kind of node. Older logs count all as the kind of its first node."""
    counts = {each: sum(groups.values()) for each, groups in gang.node_groups.items()}
    nodes = sum(counts.values())
    return {each: gpus * count // nodes for each, count in counts.items()} or {first_kind: gpus}


def _count_groups(ctx: Context, gang: Gang, gpus: int) -> None:
    risk_groups.count_time(ctx, gang, gpus, lambda kind: _today(ctx, kind))
    ctx.node_rates = None


def _look_tomorrow(ctx: Context) -> None:
    ctx.health.failures_look_ns = ctx.now_ns + DAY_NS
    ctx.wake(ctx.health.failures_look_ns, "rates", 0)


def _tell(ctx: Context, job: ClusterJob) -> bool:
    """A gang that runs hears how often its nodes fail, if that has changed much."""
    gang, prior = job.gang, ctx.policy.health.failures_per_million_node_days
    if gang is None or not gang.node_groups:
        return False
    rate = node_rates.mean_of_groups(ctx, gang.node_groups)
    before = gang.told_rate or max(1, prior)
    if abs(rate - before) * MILLION <= before * TOLD_AGAIN_PPM:
        return False
    gang.told_rate = rate
    ctx.notify(_order(ctx, job).reason, job=job.id)
    return True


def _order(ctx: Context, job: ClusterJob) -> FailureRate:
    assert job.placement is not None and job.gang is not None
    rate, groups = job.gang.told_rate, job.gang.node_groups
    seen = [node_rates.seen_now(ctx, kind) for kind in groups]
    failures, days = sum(each.failures for each in seen), sum(each.node_days for each in seen)
    why = reason(
        "failure_rate",
        rate=f"{rate // 1000}.{rate % 1000 // 10:02}",
        failures=failures,
        days=days,
        nodes=_named(groups),
    )
    order = FailureRate(
        reason=why,
        job=job.id,
        generation=job.generation,
        per_million_node_days=rate,
        failures=failures,
        node_days=days,
    )
    ctx.emit(job.placement.nodes, order)
    return order


def _named(groups: dict[str, dict[str, int]]) -> str:
    """Nodes in words: how many of which kind, and which of them are not like most."""
    return ", ".join(
        f"{number} {kind or 'nodes'}" + (f" ({group})" if group != risk_groups.OLDER else "")
        for kind, numbers in groups.items()
        for group, number in sorted(numbers.items(), key=lambda each: (-each[1], each[0]))
    )


def _today(ctx: Context, kind: str) -> FailureDay:
    failures, today = ctx.health.failures.setdefault(kind, KindFailures()), ctx.now_ns // DAY_NS
    if not failures.days or failures.days[-1].day != today:
        oldest = (ctx.now_ns - ctx.policy.health.failure_window_ns) // DAY_NS
        failures.days = [
            *(day for day in failures.days if day.day >= oldest),
            FailureDay(day=today),
        ]
    return failures.days[-1]
