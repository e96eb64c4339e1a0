"""The site of a chaos seed: its fleet, policy and jobs.

On some seeds the site is busy: teams own GPUs and lend them, classes of service preempt, jobs have
time limits, budgets, arrays and dependencies, and somebody reserves nodes.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, structs

from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.job_relations import Array
from phalanx.cluster.jobs.job import Expected, FallbackMapping, GangShape, JobSpec
from phalanx.cluster.node import Node
from phalanx.cluster.placement.request import may_use
from phalanx.cluster.policy import (
    HealthPolicy,
    Partition,
    Policy,
    Qos,
    QueuePolicy,
    Quota,
    RecoveryPolicy,
    SparePolicy,
    StoragePolicy,
    TimeoutPolicy,
)
from phalanx.simulate.draws import DrawStream, SeedDraws
from phalanx.simulate.scenario.scenario import ChaosPart
from phalanx.simulate.scenario.shape import ns

SECOND = 10**9
MINUTE = 60 * SECOND
NODE_GPUS = 4
FEW_GPUS = 2 * NODE_GPUS  # that the jobs of class "few" may hold together
SHORT_NS = 10 * MINUTE  # limit of class "short"
LAB = "lab"  # a partition with rules of its own


Kind = Literal["afterok", "afterany", "singleton"]
KINDS: tuple[Kind | None, ...] = ("afterok", "afterany", "singleton", None)


class PlannedJob(Struct, frozen=True):
    """A submission; ``after``: (kind, number of an earlier submission)."""

    spec: JobSpec
    after: tuple[tuple[Kind, int], ...] = ()

    @property
    def jobs(self) -> int:
        """Jobs that it becomes."""
        return self.spec.array.count if self.spec.array else 1


def make_fleet(count: int, lab: int = 0) -> Fleet:
    """Nodes in racks of two and leaves of four; the last ones are those of the lab."""
    return Fleet(
        Node(
            name=f"n{number}",
            gpus=NODE_GPUS,
            kind="h100",
            rails=2,
            partition=LAB if number >= count - lab else "default",
            rack=f"rack-{number // 2}",
            leaf=f"leaf-{number // 4}",
        )
        for number in range(count)
    )


def make_policy(spares: int, draws: SeedDraws, queue: QueuePolicy) -> Policy:
    """Deadlines that fit a world of seconds.

    On half of the seeds one job writes at a time; on half, elastic gangs wait for no new worker.
    """
    flushes = 1 if draws.stream("storage").chance(0.5) else 0
    start_wait_ns = 0 if draws.stream("starts").chance(0.5) else MINUTE
    return Policy(
        queue=queue,
        spares=SparePolicy(nodes=spares),
        storage=StoragePolicy(flushes=flushes),
        timeouts=TimeoutPolicy(
            heartbeat_ns=10 * SECOND, missed_heartbeats=3, round_trip_ns=3 * SECOND
        ),
        health=HealthPolicy(test_ns=MINUTE, breaker_least_nodes=3),
        recovery=RecoveryPolicy(grow_after_ns=MINUTE, start_wait_ns=start_wait_ns),
    )


def lab_nodes(count: int) -> int:
    """Nodes that a partition with rules of its own may have: the others are enough for any job."""
    return count // 4


def lab_rules(luck: DrawStream) -> Partition:
    """Whom the lab is for, or for how long; or both."""
    limited_by = luck.below(3)
    return Partition(
        priority=luck.below(2) * 50,
        teams=("team-0", "team-2") if limited_by != 1 else (),
        most_time_ns=SHORT_NS if limited_by != 0 else 0,
    )


def busy_queue(gpus: int, partitions: dict[str, Partition]) -> QueuePolicy:
    """Teams that own GPUs, classes of service with rights and limits, short times."""
    return QueuePolicy(
        partitions=partitions,
        quotas={
            "team-0": Quota(gpus=gpus // 2),
            "team-1": Quota(gpus=gpus // 4, ceiling=gpus - NODE_GPUS, weight=2),
        },
        qos={
            "normal": Qos(),
            "urgent": Qos(priority=100, preempts=True),
            "few": Qos(most_gpus=FEW_GPUS),
            "short": Qos(priority=10, most_time_ns=SHORT_NS),
        },
        least_run_ns=20 * SECOND,
        grace_ns=30 * SECOND,
        starving_ns=10 * MINUTE,
        most_stay_ns=10 * MINUTE,
        reservations=2,
    )


def usual_jobs(luck: DrawStream, settings: ChaosPart, nodes: int) -> list[JobSpec]:
    """Gangs of up to half of the fleet, some elastic, some with spares."""
    jobs = []
    for number in range(1 + luck.below(settings.jobs)):
        slots = 1 + luck.below(max(1, nodes // 2))
        elastic = slots > 1 and luck.chance(0.5)
        half = luck.chance(0.3)
        width = NODE_GPUS // 2 if half else NODE_GPUS
        spec = JobSpec(
            name=f"job-{number}",
            user=f"user-{number}",
            team=f"team-{number % 2}",
            gang=GangShape(
                replicas=slots,
                least_replicas=1 if elastic else 0,
                tensor=width,
                slot_gpus=width,
            ),
            expected=Expected(
                steps=60 + luck.below(90),
                step_ns=ns(3.0 + 4 * luck.uniform()),
                snapshot_steps=1,
                checkpoint_steps=10 + luck.below(15),
                start_ns=12 * SECOND,
                form_ns=2 * SECOND,
                restore_peer_ns=4 * SECOND,
                restore_disk_ns=6 * SECOND,
                restore_remote_ns=12 * SECOND,
            ),
            preemptible=luck.chance(0.3),
            spares=1 if slots < nodes - 1 and luck.chance(0.3) else 0,
        )
        jobs.append(spec if elastic else structs.replace(spec, fallbacks=_fallbacks(spec)))
    return jobs


def _fallbacks(spec: JobSpec) -> tuple[FallbackMapping, ...]:
    """Mappings for one node less, and for one alone."""
    slots, expected = spec.gang.replicas, spec.expected
    return tuple(
        FallbackMapping(
            gang=structs.replace(spec.gang, replicas=count),
            expected=structs.replace(expected, step_ns=expected.step_ns * slots // count),
        )
        for count in dict.fromkeys((slots - 1, 1))
        if 0 < count < slots
    )


def to_the_lab(luck: DrawStream, wanted: PlannedJob, rule: Partition, lab: int) -> PlannedJob:
    """A job that may use the lab and fits there wants nothing else, now and then."""
    spec = wanted.spec
    fits = spec.gang.slots(spec.gang.replicas) + spec.spares <= lab
    if not (fits and may_use(rule, spec) and luck.chance(0.6)):
        return wanted
    return structs.replace(wanted, spec=structs.replace(spec, partition=LAB))


def as_program(luck: DrawStream, wanted: PlannedJob, share: float) -> PlannedJob:
    """Some jobs are programs, which nothing but their lease keeps from writing."""
    if not luck.chance(share):
        return wanted
    spec = structs.replace(wanted.spec, reports_steps=False, fallbacks=())  # nobody plans them
    return structs.replace(wanted, spec=spec)


def busy_jobs(luck: DrawStream, usual: list[JobSpec], nodes: int) -> list[PlannedJob]:
    """The usual jobs with limits, budgets and classes, and smaller ones that wait for others."""
    jobs = [PlannedJob(_limited(luck, spec, nodes)) for spec in usual]
    for number in range(2 + luck.below(3)):
        first = usual[0]
        small = structs.replace(
            first,
            name=f"small-{luck.below(2)}",
            user="somebody",
            team=f"team-{luck.below(3)}",
            gang=GangShape(replicas=1 + luck.below(2), tensor=2, slot_gpus=2),
            expected=structs.replace(first.expected, steps=15 + luck.below(25), step_ns=4 * SECOND),
            array=Array(2 + luck.below(3), luck.below(3)) if luck.chance(0.3) else None,
            spares=0,
            fallbacks=(),
        )
        kind = luck.choice(KINDS)
        after = ((kind, luck.below(len(usual) + number)),) if kind else ()
        jobs.append(PlannedJob(_limited(luck, small, nodes), after))
    return jobs


def _limited(luck: DrawStream, spec: JobSpec, nodes: int) -> JobSpec:
    """A job with a class of service, perhaps a limit of its time and a budget."""
    slots = spec.gang.slots(spec.gang.replicas)
    gpus = slots * spec.gang.slot_gpus + spec.spares * NODE_GPUS
    classes = ["normal", "urgent"] + ["few"] * (gpus <= FEW_GPUS) + ["short"]
    qos = luck.choice(classes)
    limited = qos == "short" or luck.chance(0.3)
    limit = min(SHORT_NS, (4 + luck.below(7)) * MINUTE) if limited else 0
    needed = spec.expected.steps * spec.expected.step_ns * gpus // SECOND
    budget = int(needed * (1.1 + 3 * luck.uniform())) if luck.chance(0.3) else 0
    # A team with a ceiling has no job that is above it.
    team = spec.team if slots + spec.spares < nodes else "team-0"
    return structs.replace(
        spec,
        team=team,
        qos=qos,
        priority=luck.below(3),
        preemptible=luck.chance(0.5),
        time_limit_ns=limit,
        requeue_at_limit=luck.chance(0.5),
        budget_gpu_seconds=budget,
        forced=luck.chance(0.2),
    )
