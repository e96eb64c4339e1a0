"""What is wrong with a scenario as a whole: numbers that are fine alone, and not together."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.cluster.fleet_file import MOST_NODES
from phalanx.config.errors import Problem, did_you_mean, problem
from phalanx.config.numbers import nearest_multiple
from phalanx.hardware.gpus import gpus_by_key
from phalanx.hardware.tables import nearest
from phalanx.simulate.chaos.faults import KINDS
from phalanx.simulate.scenario import Scenario

# What chaos has in place of the sections that it does not look at.
INSTEAD = {
    "days": "set chaos.fault_minutes and chaos.quiet_minutes",
    "fleet": "set chaos.nodes",
    "job": "set chaos.jobs",
    "faults": "set chaos.faults and chaos.kinds",
    "workload": "set chaos.jobs",
}
ONE_JOBS = ("tensor", "context", "pipeline", "least_replicas", "steps")  # of job.*
OWN = ("name", "about", "chaos", "variants")


def problems_of(scenario: Scenario) -> list[Problem]:
    """Everything that is wrong."""
    found = _chaos(scenario) if scenario.chaos is not None else _world(scenario)
    return list(found)


def _chaos(scenario: Scenario) -> Iterator[Problem]:
    assert scenario.chaos is not None
    for kind in scenario.chaos.kinds:
        if kind not in KINDS:
            fix = did_you_mean(kind, list(KINDS))
            yield problem("chaos.kinds", kind, "no such gray fault", fix)
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


def _world(scenario: Scenario) -> Iterator[Problem]:
    fleet, job, load = scenario.fleet, scenario.job, scenario.workload
    if fleet.gpus % fleet.node_gpus:
        fix = f"try {nearest_multiple(fleet.gpus, fleet.node_gpus)}"
        rule = f"must fill nodes of {fleet.node_gpus} (fleet.node_gpus)"
        yield problem("fleet.gpus", fleet.gpus, rule, fix)
    nodes = fleet.gpus // fleet.node_gpus + fleet.spare_nodes
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
    yield from _unread(scenario)
    if load.file and load.kind != "csv":
        rule = f"is read only where workload.kind is csv, and it is {load.kind}"
        yield problem("workload.file", load.file, rule, "set workload.kind=csv")


def _unread(scenario: Scenario) -> Iterator[Problem]:
    """Settings that this kind of workload does not look at."""
    one_job = scenario.workload.kind == "one-job"
    section, part = ("workload", scenario.workload) if one_job else ("job", scenario.job)
    names = [name for name in part.__struct_fields__ if name not in ("kind", "file")]
    for name in names if one_job else ONE_JOBS:
        value = getattr(part, name)
        if value != getattr(type(part)(), name):
            rule = f"means nothing where workload.kind is {scenario.workload.kind}"
            yield problem(f"{section}.{name}", value, rule, "leave it out")
