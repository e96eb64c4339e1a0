"""How often the fleet fails, as far as it was seen, and the gangs whose checkpoints go by it.

A rate is that of nodes with eight GPUs, per million days. It is the mean of a gamma distribution:
the policy's rate counts as one failure seen, and what interrupted gangs while they ran is added to
it, by kind of node, for as long as the policy's window. Only what speaks of a node counts: not a
person's mistake or plan, nor a signal, with which one program could change everybody's interval.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from msgspec import Struct

from phalanx.cluster.causes import Cause
from phalanx.cluster.context import Context, FailureDay, HealthState, KindFailures
from phalanx.cluster.gang import node_ages
from phalanx.cluster.jobs.job import SECOND_NS, Gang, Job
from phalanx.cluster.policy import DAY_NS, MILLION, HealthPolicy
from phalanx.cluster.protocol.commands import FailureRate
from phalanx.cluster.reasons import reason

NODE_GPUS = 8
NODE_DAY_GPU_SECONDS = NODE_GPUS * DAY_NS // SECOND_NS
TOLD_AGAIN_PPM = 100_000  # gangs are told of a rate that changed by more than this
PLANNED = (Cause.HOST_MAINTENANCE, Cause.NODE_CHANGED)


class AgeFailures(Struct, frozen=True, kw_only=True):
    """What interrupted gangs on nodes of one kind and age, within the window."""

    age: str
    gpu_seconds: int
    failures: int
    prior: int  # the rate of the kind: until more is seen of an age, it is that of all

    @property
    def per_million_node_days(self) -> int:
        """The rate that follows from the kind's and from what was seen of this age."""
        return _rate(self.failures, self.gpu_seconds, self.prior)


class SeenFailures(Struct, frozen=True, kw_only=True):
    """What interrupted gangs on nodes of one kind, within the window."""

    kind: str
    gpu_seconds: int  # that gangs ran
    causes: dict[str, int]
    prior: int  # the policy's rate
    aged: tuple[tuple[str, int, int], ...] = ()  # (age, GPU seconds, failures), youngest first

    @property
    def ages(self) -> tuple[AgeFailures, ...]:
        """The same by the age of the node that failed, where that is known."""
        rate = self.per_million_node_days
        return tuple(
            AgeFailures(age=age, gpu_seconds=seconds, failures=failures, prior=rate)
            for age, seconds, failures in self.aged
        )

    @property
    def failures(self) -> int:
        """All of them."""
        return sum(self.causes.values())

    @property
    def node_days(self) -> int:
        """As nodes of eight GPUs."""
        return self.gpu_seconds // NODE_DAY_GPU_SECONDS

    @property
    def per_million_node_days(self) -> int:
        """The rate that follows from the prior and from what was seen."""
        return _rate(self.failures, self.gpu_seconds, self.prior)


def _rate(failures: int, gpu_seconds: int, prior: int) -> int:
    """Failures per million node-days: the prior counts as one that was seen."""
    before = MILLION * NODE_DAY_GPU_SECONDS // prior  # in which one failure is expected
    return max(1, (1 + failures) * MILLION * NODE_DAY_GPU_SECONDS // (before + gpu_seconds))


def seen(health: HealthState, policy: HealthPolicy, now_ns: int) -> list[SeenFailures]:
    """What is known of every kind of node now, gangs that run included."""
    return [_seen(kind, known, policy, now_ns) for kind, known in sorted(health.failures.items())]


def per_million_node_days(ctx: Context, kind: str) -> int:
    """How often nodes of a kind fail: the prior, until some have."""
    known = ctx.health.failures.get(kind, KindFailures())
    return _seen(kind, known, ctx.policy.health, ctx.now_ns).per_million_node_days


def _seen(kind: str, known: KindFailures, policy: HealthPolicy, now_ns: int) -> SeenFailures:
    since = (now_ns - policy.failure_window_ns) // DAY_NS
    causes: Counter[str] = Counter()
    aged_seconds: Counter[str] = Counter()
    aged_failures: Counter[str] = Counter()
    running_ns = now_ns * known.running_gpus - known.running_gpu_ns
    gpu_seconds = running_ns // SECOND_NS
    for day in known.days:
        if day.day >= since:
            gpu_seconds += day.gpu_seconds
            causes.update(day.causes)
            aged_seconds.update(day.aged_gpu_seconds)
            aged_failures.update(day.aged_failures)
    return SeenFailures(
        kind=kind,
        gpu_seconds=gpu_seconds,
        causes=dict(sorted(causes.items())),
        prior=max(1, policy.failures_per_million_node_days),
        aged=tuple(
            (age, aged_seconds[age], aged_failures[age])
            for age in node_ages.AGES
            if aged_seconds[age] or aged_failures[age]
        ),
    )


def begins_to_run(ctx: Context, job: Job, gang: Gang) -> None:
    """A gang runs from now on; it hears of a rate that is not the prior."""
    assert job.placement is not None
    kind = ctx.fleet.nodes[job.placement.nodes[0]].kind
    gpus = job.spec.gang.gpus(job.placement.replicas)
    gang.runs_on = (kind, gpus)
    known = ctx.health.failures.setdefault(kind, KindFailures())
    known.running_gpus += gpus
    known.running_gpu_ns += gpus * ctx.now_ns
    if known.told_rate:
        _order(ctx, job, _seen(kind, known, ctx.policy.health, ctx.now_ns))
    if not ctx.health.failures_look_ns:
        _look_tomorrow(ctx)


def ends_running(ctx: Context, gang: Gang) -> str | None:
    """The gang stops, for whatever reason; the kind of its nodes. None: it did not run."""
    if gang.runs_on is None:
        return None
    (kind, gpus), gang.runs_on = gang.runs_on, None
    known = ctx.health.failures[kind]
    known.running_gpus -= gpus
    known.running_gpu_ns -= gpus * gang.since_ns
    day = _today(ctx, known)
    day.gpu_seconds += (ctx.now_ns - gang.since_ns) * gpus // SECOND_NS
    node_ages.count_time(ctx, gang, gpus, day)
    return kind


def interrupted(ctx: Context, kind: str, cause: str, node: int) -> None:
    """What interrupted a gang that ran on such nodes is known: it counts. ``node``: -1: unknown."""
    if Cause.of(cause).node == "keep" or cause in PLANNED:
        return
    known = ctx.health.failures[kind]
    day = _today(ctx, known)
    day.causes[cause] = day.causes.get(cause, 0) + 1
    if node >= 0:
        age = node_ages.age_of(ctx, node)
        day.aged_failures[age] = day.aged_failures.get(age, 0) + 1
    _tell(ctx, kind, known)


def look_again(ctx: Context) -> None:
    """A day has passed: without failures the rate falls."""
    ctx.health.failures_look_ns = 0
    for number in ctx.view.active:
        gang = ctx.view.jobs[number].gang
        if gang is not None and gang.runs_on is not None:
            kind, gpus = gang.runs_on
            node_ages.count_time(ctx, gang, gpus, _today(ctx, ctx.health.failures[kind]))
    node_ages.forget_old(ctx)
    for kind, known in sorted(ctx.health.failures.items()):
        _tell(ctx, kind, known)
    if ctx.view.active:
        _look_tomorrow(ctx)


def _look_tomorrow(ctx: Context) -> None:
    ctx.health.failures_look_ns = ctx.now_ns + DAY_NS
    ctx.wake(ctx.health.failures_look_ns, "rates", 0)


def _tell(ctx: Context, kind: str, known: KindFailures) -> None:
    """All gangs that run on such nodes hear of a rate that changed much."""
    now = _seen(kind, known, ctx.policy.health, ctx.now_ns)
    rate, before = now.per_million_node_days, known.told_rate or now.prior
    if abs(rate - before) * MILLION <= before * TOLD_AGAIN_PPM:
        return
    known.told_rate = rate
    for number in ctx.view.active:
        job = ctx.view.jobs[number]
        if job.gang is not None and job.gang.runs_on and job.gang.runs_on[0] == kind:
            ctx.notify(_order(ctx, job, now).reason, job=job.id)


def _order(ctx: Context, job: Job, known: SeenFailures) -> FailureRate:
    assert job.placement is not None
    rate = ctx.health.failures[known.kind].told_rate
    why = reason(
        "failure_rate",
        rate=f"{rate // 1000}.{rate % 1000 // 10:02}",
        failures=known.failures,
        days=known.node_days,
    )
    order = FailureRate(
        reason=why,
        job=job.id,
        generation=job.generation,
        per_million_node_days=rate,
        failures=known.failures,
        node_days=known.node_days,
    )
    ctx.emit(job.placement.nodes, order)
    return order


def down_ppm(ctx: Context, away_ns: int) -> int:
    """Chance of a node to be away at a moment, as nodes of each kind and age were seen to fail.

    ``away_ns``: how long one stays away.
    """
    fleet, rates = ctx.fleet, {each: _ages(ctx, each) for each in _kinds(ctx)}
    counts = np.bincount(fleet.columns.node_class, minlength=len(fleet.classes)).tolist()
    total: int = sum(
        count * known.gpus * rates[known.kind][node_ages.OLDER]
        for count, known in zip(counts, fleet.classes, strict=True)
    )
    for node in ctx.health.in_service:
        kind, gpus = fleet.nodes[node].kind, fleet.nodes[node].gpus
        own = rates[kind]
        total += gpus * (own[node_ages.age_of(ctx, node)] - own[node_ages.OLDER])
    mean = total // (NODE_GPUS * max(1, len(fleet)))  # of a node, per million days
    return max(1, min(MILLION - 1, mean * away_ns // DAY_NS))


def _kinds(ctx: Context) -> dict[str, None]:
    return dict.fromkeys(known.kind for known in ctx.fleet.classes)


def _ages(ctx: Context, kind: str) -> dict[str, int]:
    """The rate of nodes of a kind, by age."""
    known = ctx.health.failures.get(kind, KindFailures())
    found = _seen(kind, known, ctx.policy.health, ctx.now_ns)
    own = {each.age: each.per_million_node_days for each in found.ages}
    return {age: own.get(age, found.per_million_node_days) for age in node_ages.AGES}


def _today(ctx: Context, known: KindFailures) -> FailureDay:
    today = ctx.now_ns // DAY_NS
    if not known.days or known.days[-1].day != today:
        oldest = (ctx.now_ns - ctx.policy.health.failure_window_ns) // DAY_NS
        known.days = [*(day for day in known.days if day.day >= oldest), FailureDay(day=today)]
    return known.days[-1]
