"""What a seed gave, and what many seeds give together."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct, field, structs


class SeedResult(Struct, kw_only=True):
    """One seed of a scenario."""

    seed: int
    interruptions: int  # unexpected faults that hit a job
    ettr: float  # kept steps as a share of the time of jobs; of one job, in the queue too
    goodput: float  # productive share of all GPU time of the fleet
    violations: int
    wall_seconds: float
    cpu_seconds: float = 0.0  # of this process: what wall_seconds would be on a quiet machine
    expected_interruptions: float = 0.0
    planned: int = 0
    rollbacks: int = 0  # by people, after the loss diverged
    failed_repairs: int = 0
    failed_starts: int = 0  # of gangs, before their first step
    formations: int = 0
    mtbf_hours: float | None = None  # between two of them; None: none was seen
    recoveries: int = 0
    mean_recovery_seconds: float = 0.0  # of those; 0 where there was none
    queued_seconds: float = 0.0  # of a scenario's one job, without nodes, since it was submitted
    days: float = 0.0
    gpus: int = 0
    gpu_hours: float = 0.0
    dollars: float = 0.0
    megawatt_hours: float = 0.0
    steps: int = 0
    jobs: int = 0
    jobs_done: int = 0
    jobs_failed: int = 0
    jobs_refused: int = 0
    median_wait_seconds: float = 0.0
    longest_wait_seconds: float = 0.0
    events: int = 0
    peak_memory_mb: float = 0.0
    buckets: dict[str, float] = field(default_factory=dict)  # shares of all GPU time
    by_cause: dict[str, int] = field(default_factory=dict)  # interruptions
    rungs: dict[str, int] = field(default_factory=dict)  # decisions that formed gangs
    node_faults: dict[str, int] = field(default_factory=dict)  # by name, of those that had any
    lost_gpu_hours: dict[str, float] = field(default_factory=dict)  # by cause
    mttf_hours: dict[str, float] = field(default_factory=dict)  # by GPUs of a job
    faults: dict[str, int] = field(default_factory=dict)  # injected, by kind (chaos)
    left_out: dict[str, int] = field(default_factory=dict)  # rows of a trace, by reason
    refused: dict[str, int] = field(default_factory=dict)  # submissions, by reason
    failed: dict[str, int] = field(default_factory=dict)  # jobs, by the code of the reason
    failures: list[str] = field(default_factory=list)  # the first of them, in words
    waiting: str = ""  # a scenario's one job at the end, if it waits for nodes: for what
    found: list[str] = field(default_factory=list)  # violations in words


class Summary(Struct, kw_only=True):
    """All seeds: mean, deviation, least and greatest of each number that some of them have."""

    scenario: str
    seeds: int
    violations: int
    mean: dict[str, float]
    deviation: dict[str, float]
    least: dict[str, float]
    greatest: dict[str, float]
    buckets: dict[str, float]
    by_cause: dict[str, float]
    wall_seconds: float


class SimulationReport(Struct, kw_only=True):
    """The document of ``--json``."""

    seeds: list[SeedResult]
    summary: Summary


SUMMED = (
    "interruptions",
    "expected_interruptions",
    "ettr",
    "goodput",
    "planned",
    "rollbacks",
    "failed_repairs",
    "failed_starts",
    "formations",
    "mtbf_hours",
    "recoveries",
    "mean_recovery_seconds",
    "queued_seconds",
    "steps",
    "jobs",
    "jobs_done",
    "jobs_failed",
    "jobs_refused",
    "median_wait_seconds",
    "longest_wait_seconds",
    "events",
    "dollars",
    "wall_seconds",
    "cpu_seconds",
    "peak_memory_mb",
)


def summarise(name: str, results: Sequence[SeedResult], wall_seconds: float) -> SimulationReport:
    """The report of some seeds."""
    columns = {
        key: [float(getattr(one, key)) for one in results if getattr(one, key) is not None]
        for key in SUMMED
    }
    columns = {key: values for key, values in columns.items() if values}
    return SimulationReport(
        seeds=list(results),
        summary=Summary(
            scenario=name,
            seeds=len(results),
            violations=sum(one.violations for one in results),
            mean={key: _mean(values) for key, values in columns.items()},
            deviation={key: _deviation(values) for key, values in columns.items()},
            least={key: min(values) for key, values in columns.items()},
            greatest={key: max(values) for key, values in columns.items()},
            buckets=_together([one.buckets for one in results]),
            by_cause=_together([dict(one.by_cause) for one in results]),
            wall_seconds=wall_seconds,
        ),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _deviation(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _together(tables: Sequence[dict[str, float]] | Sequence[dict[str, int]]) -> dict[str, float]:
    keys = dict.fromkeys(key for table in tables for key in table)
    means = {key: _mean([float(table.get(key, 0)) for table in tables]) for key in keys}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def rounded(result: SeedResult) -> SeedResult:
    """Without digits that mean nothing."""
    digits = {
        "ettr": 6,
        "goodput": 6,
        "wall_seconds": 3,
        "cpu_seconds": 3,
        "mtbf_hours": 4,
        "dollars": 0,
    }
    known = {key: getattr(result, key) for key in digits}
    changed = {key: round(value, digits[key]) for key, value in known.items() if value is not None}
    return structs.replace(result, **changed)
