"""Recorded traces: the jobs of a file, as this fleet and these days can play them."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from phalanx.cluster.jobs.job import JobSpec
from phalanx.config.errors import ConfigError
from phalanx.simulate.scenario.scenario import Scenario
from phalanx.simulate.scenario.shape import expected_of, gang, large_nodes, limit_ns, ns
from phalanx.simulate.scenario.trace_file import RecordedJob, TraceFile, read_trace

UNREADABLE_SHOWN = 3  # rows that a refusal names

# Rows that are not played, by reason.
NO_GPUS = "ask for no GPU"
NO_TIME = "never ran"
SMALL = "ask for fewer than workload.least_gpus"
LARGE = "ask for more GPUs than the fleet has"
LATE = "come after the last day"
UNREADABLE = "cannot be read"
# What would have rows played that are left out for these reasons.
WAYS_OUT = {
    UNREADABLE: "give seconds or ISO dates, and numbers",
    LARGE: "give the fleet more GPUs",
    SMALL: "set workload.least_gpus",
    LATE: "set days",
}


class Trace(Struct):
    """What a file asks for, and how many of its rows are left out, by reason."""

    jobs: list[tuple[int, JobSpec]]  # in order of their time
    left_out: dict[str, int]
    unreadable: list[str] = []  # "file:line: why"


def recorded(scenario: Scenario) -> Trace:
    """The jobs of the scenario's file."""
    if not scenario.workload.file:
        raise ConfigError("workload.file", "", "a recorded trace needs a file", "e.g. trace.csv")
    return played_of(scenario, read_trace(Path(scenario.workload.file)))


def played_of(scenario: Scenario, file: TraceFile, key: str = "workload.file") -> Trace:
    """The rows of a file as submissions, the first of them at time 0; none is refused under
    ``key``.
    """
    first = min((job.submit for job in file.jobs), default=0.0)
    trace = Trace([], dict(file.skipped), file.unreadable)
    if file.unreadable:
        trace.left_out[UNREADABLE] = len(file.unreadable)
    for job in file.jobs:
        why = _left_out(scenario, job, job.submit - first)
        if why:
            trace.left_out[why] = trace.left_out.get(why, 0) + 1
        else:
            trace.jobs.append((ns(job.submit - first), _spec(scenario, job)))
    if not trace.jobs:
        told = "; ".join(f"{count} {why}" for why, count in trace.left_out.items())
        shown = "".join(f"; {one}" for one in file.unreadable[:UNREADABLE_SHOWN])
        rule = f"has no GPU job that can be played ({told or 'it has no rows'}{shown})"
        ways_out = [way for why, way in WAYS_OUT.items() if why in trace.left_out]
        fix = ", or ".join(ways_out) or "give a file of jobs that ran on GPUs"
        raise ConfigError(key, file.path, rule, fix)
    trace.jobs.sort(key=lambda entry: entry[0])
    return trace


def _spec(scenario: Scenario, job: RecordedJob) -> JobSpec:
    steps = max(1, round(job.seconds / scenario.job.step_seconds))
    return JobSpec(
        name=f"row-{job.line}",
        user=job.user,
        team=job.team,
        gang=gang(job.gpus, scenario.fleet.node_gpus),
        expected=expected_of(scenario, steps),
        time_limit_ns=limit_ns(scenario, steps, job.limit),
        requeue_at_limit=True,
    )


def _left_out(scenario: Scenario, job: RecordedJob, seconds: float) -> str:
    """Why a row is not played; "": it is."""
    if job.gpus <= 0:
        return NO_GPUS
    if job.seconds <= 0:
        return NO_TIME
    if job.gpus < scenario.workload.least_gpus:
        return SMALL
    if job.gpus > large_nodes(scenario.fleet) * scenario.fleet.node_gpus:
        return LARGE
    return LATE if seconds > scenario.days * 86400 else ""
