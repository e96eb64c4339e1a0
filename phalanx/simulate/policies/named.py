"""Policies by name: each is settings of the core's queue, and what users ask of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct, structs

from phalanx.cluster.jobs.job import GangShape, JobSpec
from phalanx.cluster.policy import DAY_NS, Qos, QueuePolicy, Quota
from phalanx.config.errors import ConfigError, did_you_mean

ARRIVAL = {"age_weight": 0, "fair_share_weight": 0, "size_weight": 0, "short_weight": 0}
NEVER_NS = 3650 * DAY_NS
UNBOUND = {"starving_ns": NEVER_NS, "firm_after_ns": NEVER_NS}  # nobody has waited too long
CONSERVATIVE = 100  # blocked jobs with a reserved start: more are never near theirs
URGENT = "urgent"
Change = Callable[[JobSpec], JobSpec]


class NamedPolicy(Struct, frozen=True):
    """Settings of the queue with a name."""

    about: str
    settings: dict[str, int]
    owned: bool = False  # teams own GPUs, in proportion to what they ask for
    preempts: bool = False  # jobs of whole nodes and more may send small ones away
    change: Change = lambda spec: spec  # what users ask for

    def queue(self, base: QueuePolicy, jobs: Sequence[JobSpec], gpus: int) -> QueuePolicy:
        """The queue of a site with so many GPUs, for these jobs."""
        queue = structs.replace(base, **self.settings)
        if self.preempts:
            qos = {**queue.qos, URGENT: Qos(preempts=True, priority=1)}
            queue = structs.replace(queue, qos=qos)
        if self.owned:
            queue = structs.replace(queue, quotas=_quotas(jobs, gpus))
        return queue


def _quotas(jobs: Sequence[JobSpec], gpus: int) -> dict[str, Quota]:
    """GPUs that each team owns: its part of all GPU time that is asked for."""
    asked: dict[str, int] = {}
    for spec in jobs:
        work = spec.gang.gpus(spec.gang.replicas) * spec.expected.steps * spec.expected.step_ns
        asked[spec.team] = asked.get(spec.team, 0) + work
    total = max(1, sum(asked.values()))
    return {team: Quota(gpus=gpus * work // total) for team, work in sorted(asked.items())}


def _urgent(spec: JobSpec) -> JobSpec:
    if spec.gang.gpus(spec.gang.replicas) >= 8:
        return structs.replace(spec, qos=URGENT)
    return structs.replace(spec, preemptible=True)


def _in_halves(spec: JobSpec) -> JobSpec:
    """The same GPUs as slots of half the size, each wherever there is room for it."""
    slot, gpus = spec.gang.slot_gpus // 2, spec.gang.gpus(spec.gang.replicas)
    if not slot or gpus % slot:
        return spec
    gang = GangShape(replicas=gpus // slot, tensor=slot, slot_gpus=slot)
    return structs.replace(spec, gang=gang)


def _elastic(spec: JobSpec) -> JobSpec:
    spec = _in_halves(spec)
    least = spec.gang.replicas // 2
    return structs.replace(spec, gang=structs.replace(spec.gang, least_replicas=least))


POLICIES: dict[str, NamedPolicy] = {
    "default": NamedPolicy("what a site gets that sets nothing", {}),
    "fifo": NamedPolicy(
        "in order of arrival, nobody overtakes",
        {**ARRIVAL, "backfill_depth": 0, **UNBOUND},
    ),
    "easy": NamedPolicy(
        "in order of arrival; others start where the first that waits is not delayed",
        {**ARRIVAL, "reservations": 1, **UNBOUND},
    ),
    "conservative": NamedPolicy(
        f"the same, and none of the first {CONSERVATIVE} that wait is delayed",
        {**ARRIVAL, "reservations": CONSERVATIVE, **UNBOUND},
    ),
    "fair-share": NamedPolicy(
        "teams that used less come first",
        {"size_weight": 0, "short_weight": 0, "fair_share_weight": 1000},
    ),
    "size-bonus": NamedPolicy(
        "the same, and large jobs come before small ones",
        {"size_weight": 100, "short_weight": 0, "fair_share_weight": 1000},
    ),
    "preemption": NamedPolicy(
        "the default; jobs of a node and more send smaller ones away", {}, False, True, _urgent
    ),
    "quotas": NamedPolicy(
        "the default; teams own GPUs by what they ask for, and lend them", {}, owned=True
    ),
    "half-slots": NamedPolicy(
        "the default with looser gangs: of slots half as large, each on a node of its own",
        {},
        change=_in_halves,
    ),
    "elastic": NamedPolicy(
        "the same, and jobs of several slots start with half of them", {}, change=_elastic
    ),
}


def policy_named(name: str) -> NamedPolicy:
    """A policy by name."""
    if name not in POLICIES:
        fix = did_you_mean(name, list(POLICIES))
        raise ConfigError("--policy", name, "no such policy", fix)
    return POLICIES[name]
