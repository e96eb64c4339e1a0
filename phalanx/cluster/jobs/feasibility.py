"""What can never run here is refused when it is submitted, with the reason."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import structs

from phalanx.cluster.jobs.job import LONGEST_NS, MOST_PRIORITY, ClusterJob, JobSpec
from phalanx.cluster.placement.choose import never_fits
from phalanx.cluster.placement.free_index import free_index_of
from phalanx.cluster.placement.request import PlacementRequest, gpus_of, request_of, tensor_slots
from phalanx.cluster.policy import Policy, QueuePolicy, Quota
from phalanx.cluster.reasons import Code, Reason, reason, span_of
from phalanx.cluster.state import View
from phalanx.cluster.units import MILLION, SECOND_NS
from phalanx.config.errors import ConfigProblem, did_you_mean, problem


class RuleBroken(Code):
    """A rule of the site that a job breaks; what would have to change depends on it."""

    TOO_MANY_GPUS = "too_many_gpus"
    UNKNOWN_PARTITION = "unknown_partition"
    PARTITION_CLOSED = "partition_closed"
    PARTITIONS_BARRED = "partitions_barred"
    TIME_LIMIT_MISSING = "time_limit_missing"
    TIME_LIMIT_TOO_LONG = "time_limit_too_long"


# What would have to change for a job that became impossible while it waited.
CHANGES: dict[RuleBroken | None, str] = {
    RuleBroken.TOO_MANY_GPUS: "raise that limit, or cancel it and submit it smaller",
    RuleBroken.UNKNOWN_PARTITION: "nodes must join that partition, or cancel it and submit it"
    " elsewhere",
    RuleBroken.PARTITION_CLOSED: "let its team in, or cancel it and submit it elsewhere",
    RuleBroken.PARTITIONS_BARRED: "change their rules, or cancel it and submit it smaller",
    RuleBroken.TIME_LIMIT_MISSING: "lift that limit, or cancel it and submit it with one",
    RuleBroken.TIME_LIMIT_TOO_LONG: "raise that limit, or cancel it and submit it with a shorter"
    " one",
}
MORE_NODES = "such nodes must join, or cancel it and submit it anew"


def admit(view: View, spec: JobSpec) -> Reason | None:
    """Why a submission can never run here; None: it can."""
    job = ClusterJob(id=0, spec=spec, submitted_ns=view.now_ns)
    return (
        _names(view, spec)
        or _partition(view, spec)
        or _times(view, spec)
        or beyond_limits(view, job, spec.gang.floor)
        or _no_capacity(view, request_of(job, spec.gang.floor, view.policy))
    )


def latest_start_ns(spec: JobSpec) -> int:
    """When a submission with a deadline must have started to be done by then.

    By the least that its plan gives it, or by its time limit where that is less or nobody planned.
    """
    planned = spec.plan.run_seconds if spec.plan is not None else None
    steps_ns, limit_ns = planned.low * SECOND_NS if planned else 0, spec.time_limit_ns
    needed_ns = min(limit_ns, steps_ns) if limit_ns and steps_ns else limit_ns or steps_ns
    return spec.deadline_ns - needed_ns


def out_of_time(spec: JobSpec, now_ns: int) -> Reason | None:
    """Why the times of a submission make no sense now; None: they do."""
    for key in ("begin_ns", "deadline_ns"):
        if getattr(spec, key) > now_ns + LONGEST_NS:
            rule = "must not be later than in ten years"
            return reason("bad_field", key=key, value=str(getattr(spec, key)), rule=rule)
    begin_ns, deadline_ns = max(now_ns, spec.begin_ns), spec.deadline_ns
    if not deadline_ns:
        return None
    if deadline_ns <= now_ns:
        return reason("deadline_past", ago=span_of(now_ns - deadline_ns))
    if latest_start_ns(spec) >= begin_ns:
        return None
    needed = span_of(deadline_ns - latest_start_ns(spec))
    return reason("deadline_near", needed=needed, left=span_of(max(0, deadline_ns - begin_ns)))


def never_starts(view: View, job: ClusterJob) -> Reason | None:
    """What became of the site since a job was submitted so that it cannot start; None: it can.

    Only what binds starts too is looked at. A person may change it back, so the job goes on
    waiting.
    """
    spec = job.spec
    least = min(spec.gang.floor, job.wanted_replicas)
    rule = view.policy.queue.partitions.get(spec.partition)
    # It starts with the spares that there are: none have to be.
    request = structs.replace(request_of(job, least, view.policy), spares=0)
    why = _partition(view, spec)
    if why is None and rule is not None:
        why = _too_long(spec, f"partition {spec.partition}", rule.most_time_ns)
    if why is None:
        shared = _too_many(gpus_of(view.fleet, job, least), _shared_limits(view, spec))
        why = shared or _no_capacity(view, request)
    if why is None:
        return None
    change = CHANGES.get(RuleBroken.of(why), MORE_NODES)
    return reason("never_as_is", why=str(why), change=change)


def _names(view: View, spec: JobSpec) -> Reason | None:
    policy = view.policy.queue
    if spec.qos not in policy.qos:
        nearest = did_you_mean(spec.qos, list(policy.qos))
        return reason("unknown_qos", qos=spec.qos, nearest=nearest)
    teams = policy.qos[spec.qos].teams
    if teams and spec.team not in teams:
        return reason("qos_closed", qos=spec.qos, teams=", ".join(teams), team=spec.team)
    return None


def _partition(view: View, spec: JobSpec) -> Reason | None:
    policy = view.policy.queue
    if not spec.partition:
        return None
    partitions = dict.fromkeys(known.partition for known in view.fleet.classes)
    if spec.partition not in partitions:
        nearest = did_you_mean(spec.partition, list(partitions))
        return RuleBroken.UNKNOWN_PARTITION.because(partition=spec.partition, nearest=nearest)
    rule = policy.partitions.get(spec.partition)
    if rule is not None and rule.teams and spec.team not in rule.teams:
        facts = {"partition": spec.partition, "teams": ", ".join(rule.teams), "team": spec.team}
        return RuleBroken.PARTITION_CLOSED.because(**facts)
    return None


def _times(view: View, spec: JobSpec) -> Reason | None:
    policy = view.policy.queue
    rule = policy.partitions.get(spec.partition)
    limits = [(f"class of service {spec.qos}", policy.qos[spec.qos].most_time_ns)]
    if rule is not None:
        limits.append((f"partition {spec.partition}", rule.most_time_ns))
    for what, most in limits:
        why = _too_long(spec, what, most)
        if why is not None:
            return why
    return None


def _too_long(spec: JobSpec, what: str, most: int) -> Reason | None:
    if most and not spec.time_limit_ns:
        return RuleBroken.TIME_LIMIT_MISSING.because(what=what, most=most // 10**9)
    if most and spec.time_limit_ns > most:
        wanted = spec.time_limit_ns // 10**9
        return RuleBroken.TIME_LIMIT_TOO_LONG.because(what=what, wanted=wanted, most=most // 10**9)
    return None


def beyond_limits(view: View, job: ClusterJob, replicas: int) -> Reason | None:
    """Which limit is below what so many replicas of a job need."""
    rule = view.policy.queue.qos.get(job.spec.qos)
    own = (f"a job of class of service {job.spec.qos}", rule.most_gpus_per_job if rule else 0)
    return _too_many(gpus_of(view.fleet, job, replicas), [own, *_shared_limits(view, job.spec)])


def _shared_limits(view: View, spec: JobSpec) -> list[tuple[str, int]]:
    """What a class of service and a team may hold together; 0: any number."""
    rule, quota = view.policy.queue.qos.get(spec.qos), view.quotas.get(spec.team)
    return [
        (f"class of service {spec.qos}", rule.most_gpus if rule else 0),
        (f"the ceiling of team {spec.team}", quota.ceiling if quota else 0),
    ]


def _too_many(gpus: int, limits: list[tuple[str, int]]) -> Reason | None:
    for what, most in limits:
        if most and gpus > most:
            return RuleBroken.TOO_MANY_GPUS.because(gpus=gpus, what=what, most=most)
    return None


def _no_capacity(view: View, request: PlacementRequest) -> Reason | None:
    shape = request.shape
    if not tensor_slots(shape):
        facts = {"tensor": shape.tensor, "slot_gpus": shape.slot_gpus}
        return reason("tensor_across_slots", **facts)
    free_index = free_index_of(view.fleet)
    classes = free_index.suiting(shape, request.constraint, request.partition, request.barred)
    never = never_fits(view.fleet, free_index, request, classes)
    if never is None or not request.barred:
        return never
    everywhere = free_index.suiting(shape, request.constraint, request.partition)
    if never_fits(view.fleet, free_index, request, everywhere) is not None:
        return never
    return RuleBroken.PARTITIONS_BARRED.because(
        partitions=", ".join(request.barred), why=str(never)
    )


def _outside(key: str, value: int, least: int, most: int = 0) -> Iterator[ConfigProblem]:
    """What is wrong with a number; ``most`` 0: as large as makes sense for one of its kind."""
    if value < least:
        rule = "must not be negative" if least == 0 else f"must be at least {least}"
        yield problem(key, value, rule, f"set {least} or more")
    most = most or (LONGEST_NS if key.endswith("_ns") else MOST_PRIORITY)
    if value > most:
        told = f"{most} (ten years)" if most == LONGEST_NS else str(most)
        yield problem(key, value, f"must not be above {told}", f"set {most} or less")


def quota_problems(key: str, quota: Quota) -> Iterator[ConfigProblem]:
    """What is wrong with the quota of a team."""
    yield from _outside(f"{key}.gpus", quota.gpus, 0)
    yield from _outside(f"{key}.ceiling", quota.ceiling, 0)
    yield from _outside(f"{key}.weight", quota.weight, 1)
    if 0 < quota.ceiling < quota.gpus:
        rule = f"must not be below the {quota.gpus} GPUs that the team owns"
        yield problem(f"{key}.ceiling", quota.ceiling, rule, f"set 0 or at least {quota.gpus}")


# Where less than nothing, or nothing, makes no sense: the least that does.
LEAST = {
    "spares.nodes": -1,
    "fabric.domain_bytes_per_second": 1,
    "fabric.nic_bytes_per_second": 1,
    "fabric.leaf_oversubscription_ppm": 1,
    "fabric.pod_oversubscription_ppm": 1,
    "timeouts.heartbeat_ns": 1,
    "timeouts.missed_heartbeats": 1,
    "timeouts.hang_steps": 1,
    "timeouts.least_program_hang_ns": 1,
    "timeouts.first_step_ns": 1,
    "timeouts.slack_ppm": 1,
    "health.test_ns": 1,
    "health.strikes": 1,
    "health.lemon_half_life_ns": 1,
    "recovery.same_step_failures": 1,
    "recovery.room_tries": 1,
    "recovery.storage_tries": 1,
    "recovery.failed_formations": 1,
    "fabric_checks.limit_ns": SECOND_NS,
    "fabric_checks.pause_ns": SECOND_NS,
    "fabric_checks.most_nodes": 3,
    "fabric_checks.slower_ppm": 10_000,
    "fabric_checks.confirmations": 1,
}
SHARES = (
    "spares.quantile_ppm",
    "spares.down_ppm",
    "health.breaker_nodes_ppm",
    "price.budget_warning_ppm",
    "fabric_checks.slower_ppm",
    "fabric_checks.most_drained_ppm",
)
MOST = 1 << 62


def policy_problems(policy: Policy) -> list[ConfigProblem]:
    """What is wrong with a site's rules."""
    problems = _queue_problems(policy.queue)
    parts = (
        *("users", "spares", "fabric", "timeouts", "health", "recovery", "storage", "price"),
        "fabric_checks",
    )
    numbers = {
        f"{part}.{name}": value
        for part in parts
        for name, value in structs.asdict(getattr(policy, part)).items()
        if isinstance(value, int) and not isinstance(value, bool)
    }
    for key, value in (numbers | {"ended_jobs": policy.ended_jobs}).items():
        most = MILLION if key in SHARES else LONGEST_NS if key.endswith("_ns") else MOST
        problems.extend(_outside(key, value, LEAST.get(key, 0), most))
    return problems


def _queue_problems(policy: QueuePolicy) -> list[ConfigProblem]:
    problems: list[ConfigProblem] = []

    def least(key: str, value: int, bound: int) -> None:
        problems.extend(_outside(key, value, bound))

    for team, quota in policy.quotas.items():
        if not team:
            problems.append(problem("queue.quotas", '""', "a team must have a name", "name it"))
        problems += quota_problems(f"queue.quotas.{team}", quota)
    for name, qos in policy.qos.items():
        for field in ("most_gpus_per_job", "most_gpus", "most_time_ns"):
            least(f"queue.qos.{name}.{field}", getattr(qos, field), 0)
        least(f"queue.qos.{name}.priority", qos.priority, -MOST_PRIORITY)
    for name, partition in policy.partitions.items():
        least(f"queue.partitions.{name}.priority", partition.priority, -MOST_PRIORITY)
        least(f"queue.partitions.{name}.most_time_ns", partition.most_time_ns, 0)
    for field in ("half_life_ns", "age_full_ns", "reservations", "unbounded_ns"):
        least(f"queue.{field}", getattr(policy, field), 1)
    for field in (
        "age_weight",
        "fair_share_weight",
        "size_weight",
        "short_weight",
        "quota_weight",
        "backfill_depth",
        "grace_ns",
        "least_run_ns",
        "most_stay_ns",
        "starving_ns",
        "firm_after_ns",
        "starving_reservations",
        "replan_ns",
        "delay_ns",
    ):
        least(f"queue.{field}", getattr(policy, field), 0)
    if "normal" not in policy.qos:
        rule = "jobs that name no class of service have this one"
        problems.append(problem("queue.qos", ", ".join(policy.qos), rule, 'add "normal"'))
    return problems
