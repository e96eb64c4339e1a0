"""What is wrong with a scenario as a whole: numbers that are fine alone, and not together."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from phalanx.config.errors import ConfigProblem, did_you_mean, problem
from phalanx.config.rules.numbers import nearest_multiple
from phalanx.hardware.gpus import gpus_by_key
from phalanx.hardware.tables import nearest
from phalanx.simulate.scenario.chaos_faults import KINDS
from phalanx.simulate.scenario.scenario import MOST_NODES, Scenario, WorkloadPart
from phalanx.simulate.scenario.shape import large_nodes

# What chaos has in place of the sections that it does not look at.
INSTEAD = {
    "days": "set chaos.fault_minutes and chaos.quiet_minutes",
    "fleet": "set chaos.nodes",
    "job": "set chaos.jobs",
    "faults": "set chaos.faults and chaos.kinds",
    "workload": "set chaos.jobs",
}
ONE_JOBS = ("tensor", "context", "pipeline", "least_replicas", "fallbacks", "steps")  # of job.*
OWN = ("name", "about", "chaos", "variants")


# Of workload.*, by its kind.
READ = {
    "one-job": ("kind", "file"),
    "csv": ("kind", "file", "least_gpus", "limit_factor"),
}


def problems_of(scenario: Scenario, given: Collection[str] = ()) -> list[ConfigProblem]:
    """Everything that is wrong; ``given``: keys that somebody set for this very world."""
    if scenario.chaos is not None:
        return list(_chaos(scenario))
    return [*_world(scenario), *_without_effect(scenario, given)]


def _chaos(scenario: Scenario) -> Iterator[ConfigProblem]:
    assert scenario.chaos is not None
    for fault in scenario.chaos.kinds:
        if fault not in KINDS:
            fix = did_you_mean(fault, list(KINDS))
            yield problem("chaos.kinds", fault, "no such gray fault", fix)
    usual = Scenario()
    for key in Scenario.__struct_fields__:
        value, before = getattr(scenario, key), getattr(usual, key)
        if key in OWN or value == before:
            continue
        changed = _changed(key, value, before)
        rule = "chaos has a small fleet, times and jobs of its own and does not look at it"
        fix = INSTEAD.get(key, "phalanx simulate keys chaos lists what it looks at")
        yield problem(changed[0], changed[1], rule, fix)


def _changed(key: str, value: object, before: object) -> tuple[str, object]:
    for name in getattr(value, "__struct_fields__", ()):
        if getattr(value, name) != getattr(before, name):
            return f"{key}.{name}", getattr(value, name)
    return key, value


def _world(scenario: Scenario) -> Iterator[ConfigProblem]:
    fleet, job, load = scenario.fleet, scenario.job, scenario.workload
    small_gpus = fleet.small_nodes * fleet.small_node_gpus
    if (fleet.gpus - small_gpus) % fleet.node_gpus:
        fix = f"try {small_gpus + nearest_multiple(fleet.gpus - small_gpus, fleet.node_gpus)}"
        rule = f"must fill nodes of {fleet.node_gpus} (fleet.node_gpus)"
        yield problem("fleet.gpus", fleet.gpus, rule, fix)
    if fleet.small_nodes and (load.kind == "one-job" or small_gpus > fleet.gpus):
        rule = f"have {small_gpus:,} of fleet.gpus = {fleet.gpus:,}, and one job needs like nodes"
        fix = "lower it" if load.kind != "one-job" else "set workload.kind, or leave it out"
        yield problem("fleet.small_nodes", fleet.small_nodes, rule, fix)
    nodes = large_nodes(fleet) + fleet.small_nodes + fleet.spare_nodes
    if nodes > MOST_NODES:
        rule = f"makes {nodes:,} nodes with the others; at most {MOST_NODES:,} can be played"
        yield problem("fleet.spare_nodes", fleet.spare_nodes, rule, "lower it")
    kinds = gpus_by_key()
    if fleet.kind not in kinds:
        rule = "is not in the catalogue of GPUs"
        yield problem("fleet.kind", fleet.kind, rule, nearest(fleet.kind, list(kinds)))
    if job.exposed_share + job.bubble_share >= 1:
        rule = f"leaves nothing of a step beside job.exposed_share = {job.exposed_share:g}"
        yield problem("job.bubble_share", job.bubble_share, rule, "lower one of them")
    for least, rate in scenario.faults.by_job_gpus.items():
        if not least.isdecimal() or not 1 <= int(least) <= MOST_NODES:
            rule = f"must name the least GPUs of such jobs, a number from 1 to {MOST_NODES:,}"
            yield problem(f"faults.by_job_gpus.{least}", rate, rule, "e.g. faults.by_job_gpus.64")
    people = scenario.people
    if people.last_hour <= people.first_hour:
        rule = f"must come after people.first_hour = {people.first_hour}"
        yield problem("people.last_hour", people.last_hour, rule, f"e.g. {people.first_hour + 1}")
    idle, watts = fleet.idle_watts_per_gpu, fleet.watts_per_gpu
    if idle is not None and watts is not None and idle > watts:
        rule = f"is more than fleet.watts_per_gpu = {watts:g}"
        yield problem("fleet.idle_watts_per_gpu", idle, rule, "lower it")
    if load.file and load.kind != "csv":
        rule = f"is read only where workload.kind is csv, and it is {load.kind}"
        yield problem("workload.file", load.file, rule, "set workload.kind=csv")


def _unread(scenario: Scenario, given: Collection[str]) -> Iterator[ConfigProblem]:
    """Settings that this kind of workload does not look at."""
    workload_kind = scenario.workload.kind
    names = [("workload", name) for name in WorkloadPart.__struct_fields__]
    names = [
        entry for entry in names if workload_kind in READ and entry[1] not in READ[workload_kind]
    ]
    if workload_kind != "one-job":
        names += [("job", name) for name in ONE_JOBS]
    for section, name in names:
        part = getattr(scenario, section)
        value, key = getattr(part, name), f"{section}.{name}"
        if key in given or value != getattr(type(part)(), name):
            rule = f"means nothing where workload.kind is {workload_kind}"
            yield problem(key, value, rule, "leave it out")


def _without_effect(scenario: Scenario, given: Collection[str]) -> Iterator[ConfigProblem]:
    """Settings for this world that would change nothing in it."""
    yield from _unread(scenario, given)
    load, policy, job = scenario.workload, scenario.policy, scenario.job
    if "workload.starved_days" in given and load.kind == "multi-tenant" and load.utilisation >= 1:
        rule = (
            f"is not looked at where workload.utilisation is {load.utilisation:g}: somebody waits"
        )
        fix = "leave it out, or ask for less than 1"
        yield problem("workload.starved_days", load.starved_days, rule, fix)
    if not policy.rebalance and job.micro_batches < 2:
        rule = f"changes nothing: job.micro_batches is {job.micro_batches}, too few to give away"
        yield problem("policy.rebalance", False, rule, "leave it out, or set job.micro_batches")
    if job.fallbacks and job.least_replicas:
        rule = "changes nothing: with job.least_replicas it goes on with fewer replicas"
        yield problem("job.fallbacks", True, rule, "leave one of them out")
    if not policy.shrink and not job.least_replicas:
        rule = "changes nothing: no job has fewer replicas that it can go on with"
        yield problem("policy.shrink", False, rule, "leave it out, or set job.least_replicas")
