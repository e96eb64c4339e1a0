"""From a scenario to what the core is given: fleet, policy, and the big job's gang."""

from __future__ import annotations

import math

from msgspec import structs

from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.jobs.job import Expected, FallbackMapping, GangShape, JobSpec
from phalanx.cluster.node import Node
from phalanx.cluster.policy import (
    FabricCheckPolicy,
    HealthPolicy,
    Policy,
    PricePolicy,
    QueuePolicy,
    Quota,
    RecoveryPolicy,
    SparePolicy,
    TimeoutPolicy,
)
from phalanx.config.errors import ConfigError
from phalanx.config.rules.numbers import divisors, nearest_multiple
from phalanx.hardware.clusters import ClusterFile, make_cluster
from phalanx.simulate.scenario.scenario import FleetPart, QueuePart, Scenario

SECOND_NS = 10**9


def ns(seconds: float) -> int:
    """Seconds as integer nanoseconds."""
    return round(seconds * SECOND_NS)


def large_nodes(part: FleetPart) -> int:
    """Nodes with ``fleet.node_gpus``, spares left out."""
    return max(0, part.gpus - part.small_nodes * part.small_node_gpus) // part.node_gpus


def job_nodes(scenario: Scenario) -> int:
    """Nodes that jobs run on, spares left out."""
    return large_nodes(scenario.fleet) + scenario.fleet.small_nodes


def make_fleet(scenario: Scenario) -> Fleet:
    """All nodes, spares among them: every rack, feed, leaf and pod is filled in order."""
    settings = scenario.fleet
    nodes, large = job_nodes(scenario) + settings.spare_nodes, large_nodes(settings)
    small = range(large, large + settings.small_nodes)
    return Fleet(
        Node(
            name=f"n{number:05d}",
            gpus=settings.small_node_gpus if number in small else settings.node_gpus,
            kind=settings.kind,
            rails=settings.rails,
            rack=f"rack-{number // settings.rack_nodes}",
            power=f"feed-{number // (settings.rack_nodes * settings.power_racks)}",
            leaf=f"leaf-{number // settings.leaf_nodes}",
            pod=f"pod-{number // settings.pod_nodes}",
        )
        for number in range(nodes)
    )


def make_policy(scenario: Scenario) -> Policy:
    """The site's decisions."""
    settings, detection = scenario.policy, scenario.detection
    teams = scenario.workload.teams if scenario.workload.kind == "multi-tenant" else 0
    quota = Quota(gpus=scenario.fleet.gpus // teams) if teams else None
    pool = 0 if scenario.fleet.spares_warm else scenario.fleet.spare_nodes
    return Policy(
        queue=queue_of(
            scenario.queue,
            {f"team-{number}": quota for number in range(teams)} if quota else {},
        ),
        spares=SparePolicy(nodes=pool),
        timeouts=TimeoutPolicy(
            heartbeat_ns=ns(detection.heartbeat_seconds),
            missed_heartbeats=detection.missed_heartbeats,
            round_trip_ns=min(SECOND_NS, ns(detection.heartbeat_seconds) // 2),
            slack_ppm=_slack_ppm(scenario.restart.spread),
        ),
        health=HealthPolicy(
            test_ns=2 * ns(scenario.repair.check_seconds) + 60 * SECOND_NS,
            breaker_nodes_ppm=round(settings.quarantine_breaker_share * 1e6),
        ),
        recovery=RecoveryPolicy(
            order=settings.order,
            in_place=settings.in_place,
            swap=settings.swap,
            shrink=settings.shrink,
            start_wait_ns=ns(settings.start_wait_seconds),
            rebalance=settings.rebalance,
            degraded=settings.degraded,
            peer_memory=settings.peer_memory,
            spike_rollback_steps=rollback_steps(scenario),
        ),
        price=price_of(scenario.fleet),
        fabric_checks=FabricCheckPolicy(at_join=settings.fabric_checks),
    )


def rollback_steps(scenario: Scenario) -> int:
    """Steps that a job goes back before its loss diverged; 0: none ever does."""
    people = scenario.people
    if not people.divergences_per_day:
        return 0
    return max(1, round(people.rollback_minutes * 60 / scenario.job.step_seconds))


def queue_of(settings: QueuePart, quotas: dict[str, Quota]) -> QueuePolicy:
    """The order of the queue, as a site's policy file would have it."""
    return QueuePolicy(
        quotas=quotas,
        half_life_ns=ns(settings.half_life_days * 86400),
        age_weight=settings.age_weight,
        age_full_ns=ns(settings.age_full_days * 86400),
        fair_share_weight=settings.fair_share_weight,
        size_weight=settings.size_weight,
        short_weight=settings.short_weight,
        backfill_depth=settings.backfill_depth,
        reservations=settings.reservations,
        starving_ns=ns(settings.starving_hours * 3600),
        firm_after_ns=ns(settings.firm_after_hours * 3600),
        starving_reservations=settings.starving_reservations,
        least_run_ns=ns(settings.least_run_minutes * 60),
    )


def price_of(settings: FleetPart) -> PricePolicy:
    """What a GPU costs and draws: as was set, or as the catalogue has it with its usual server."""
    usual, catalogued = (
        PricePolicy(),
        make_cluster(settings.kind, ClusterFile(gpu=settings.kind, gpus=1)),
    )
    dollars, watts, idle = (
        settings.dollars_per_gpu_hour,
        settings.watts_per_gpu,
        settings.idle_watts_per_gpu,
    )
    watts = catalogued.watts_per_gpu if watts is None else watts
    if idle is None:
        idle = watts * usual.idle_watts_per_gpu / usual.watts_per_gpu
    return PricePolicy(
        micro_dollars_per_gpu_hour=round(
            1e6 * (catalogued.price_per_gpu_hour if dollars is None else dollars)
        ),
        watts_per_gpu=round(watts),
        idle_watts_per_gpu=round(idle),
    )


def _slack_ppm(spread: float) -> int:
    """What phases may take of what is expected: not one in 700 takes longer by luck alone."""
    return max(TimeoutPolicy().slack_ppm, round(math.exp(3 * spread) * 1e6))


def expected_of(scenario: Scenario, steps: int = 0) -> Expected:
    """The times that the core plans with: those that the world has."""
    job, check, restart = scenario.job, scenario.checkpoint, scenario.restart
    step = ns(job.step_seconds)
    every = round(check.interval_seconds / job.step_seconds) if check.interval_seconds else 0
    whole = restart.seconds > 0
    return Expected(
        steps=steps,
        step_ns=step,
        exposed_ns=round(step * job.exposed_share),
        bubble_ns=round(step * job.bubble_share),
        micro_batches=job.micro_batches,
        snapshot_steps=check.memory_steps,
        snapshot_ns=ns(check.memory_stall_seconds),
        checkpoint_steps=max(1, every) if check.interval_seconds else 0,
        checkpoint_ns=ns(check.stall_seconds),
        flush_ns=ns(check.flush_seconds),
        start_ns=ns(restart.seconds if whole else restart.start_seconds),
        standby_ns=0 if whole else ns(restart.standby_seconds or 0.0),
        rejoin_ns=0 if whole else ns(restart.rejoin_seconds),
        form_ns=0 if whole else ns(restart.form_seconds),
        restore_peer_ns=0 if whole else ns(restart.restore_peer_seconds),
        restore_disk_ns=0 if whole else ns(restart.restore_disk_seconds),
        restore_remote_ns=0 if whole else ns(restart.restore_remote_seconds),
    )


def limit_ns(scenario: Scenario, steps: int, seconds: float = 0.0) -> int:
    """The time limit of a job: as recorded in seconds, or its user's guess, and time to start."""
    factor, restart = scenario.workload.limit_factor, scenario.restart
    whole = steps * scenario.job.step_seconds
    if not factor and not seconds:
        return 0
    start = restart.seconds or restart.start_seconds + restart.form_seconds
    return ns((max(seconds, whole) if seconds else factor * whole) + 2 * start)


def gang(gpus: int, node_gpus: int) -> GangShape:
    """Data-parallel ranks on parts of a node or on whole ones."""
    if gpus <= node_gpus:
        return GangShape(replicas=1, tensor=gpus, slot_gpus=gpus)
    return GangShape(
        replicas=-(-gpus // node_gpus), tensor=node_gpus, slot_gpus=node_gpus, whole_nodes=True
    )


def big_job(scenario: Scenario) -> JobSpec:
    """The one job that fills the fleet."""
    settings, fleet = scenario.job, scenario.fleet
    inner = settings.tensor * settings.context
    if fleet.gpus % inner:
        fix = f"try {nearest_multiple(fleet.gpus, inner)}, or set job.tensor"
        rule = f"must be a multiple of job.tensor * job.context = {inner}"
        raise ConfigError("fleet.gpus", fleet.gpus, rule, fix)
    # Faults do not ask for the depth of the pipeline: the nearest one that divides will do.
    pipeline = max(d for d in divisors(fleet.gpus // inner) if d <= settings.pipeline)
    replicas = fleet.gpus // (inner * pipeline)
    if settings.least_replicas > replicas:
        rule = f"is more than the {replicas} replicas of the job"
        raise ConfigError(
            "job.least_replicas", settings.least_replicas, rule, f"at most {replicas}"
        )
    shape = GangShape(
        replicas=replicas,
        least_replicas=settings.least_replicas,
        tensor=settings.tensor,
        context=settings.context,
        pipeline=pipeline,
        slot_gpus=fleet.node_gpus,
        whole_nodes=True,
    )
    expected = expected_of(scenario, settings.steps)
    return JobSpec(
        name="run",
        gang=shape,
        expected=expected,
        spares=fleet.spare_nodes if fleet.spares_warm else 0,
        fallbacks=_fallbacks(shape, expected) if settings.fallbacks else (),
    )


def _fallbacks(shape: GangShape, expected: Expected) -> tuple[FallbackMapping, ...]:
    """Fewer replicas of a job that cannot shrink, which share its batch."""
    counts = dict.fromkeys(shape.replicas * quarters // 4 for quarters in (3, 2))
    return tuple(
        FallbackMapping(
            gang=structs.replace(shape, replicas=count),
            expected=structs.replace(expected, step_ns=expected.step_ns * shape.replicas // count),
        )
        for count in counts
        if 0 < shape.slots(count) < shape.slots(shape.replicas)
    )
