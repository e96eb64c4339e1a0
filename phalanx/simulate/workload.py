"""Which jobs come: one giant, a generated mix of teams, or a recorded trace."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from phalanx.cluster.job import GangShape, JobSpec
from phalanx.config.errors import ConfigError, did_you_mean
from phalanx.simulate.draws import Draws, Stream
from phalanx.simulate.gangs import USER_ERROR
from phalanx.simulate.scenario import Scenario
from phalanx.simulate.shape import big_job, expected_of, ns

Submission = tuple[int, JobSpec]

# GPUs of a job and how many of all jobs ask for so many. Acme (Hu et al., NSDI 2024) and Philly
# (Jeon et al., ATC 2019): most jobs are one GPU, and the few large ones use most of the GPU time.
SIZES = (
    (1, 0.52),
    (2, 0.09),
    (4, 0.08),
    (8, 0.17),
    (16, 0.05),
    (32, 0.035),
    (64, 0.025),
    (128, 0.015),
    (256, 0.009),
    (512, 0.004),
    (1024, 0.0015),
    (2048, 0.0005),
)
# Median seconds and sigma of the lognormal length of jobs up to a size: small jobs are short and
# scattered (a median of minutes in Acme and Philly), large ones run for hours to days.
LENGTHS = ((4, 300.0, 2.2), (32, 1200.0, 1.9), (256, 7200.0, 1.5), (1 << 40, 36000.0, 1.1))
LONGEST_SECONDS = 14 * 86400.0
NIGHT_SHARE = 0.4  # of the submissions of a busy hour, at the quietest one
WEEKEND_SHARE = 0.6
DAY_SECONDS = 86400.0


def submissions(scenario: Scenario, draws: Draws) -> list[Submission]:
    """Every submission with its time, in order."""
    kind = scenario.workload.kind
    if kind == "one-job":
        return [(0, big_job(scenario))]
    if kind == "csv":
        return recorded(scenario)
    return generated(scenario, draws)


def generated(scenario: Scenario, draws: Draws) -> list[Submission]:
    """A mix of teams' jobs; lengths are scaled so that the wanted load comes out."""
    part, fleet = scenario.workload, scenario.fleet
    largest = max(part.least_gpus, int(fleet.gpus * part.largest_share))
    sizes = [(gpus, share) for gpus, share in SIZES if part.least_gpus <= gpus <= largest]
    if not sizes:
        rule = f"no job fits between {part.least_gpus} and {largest} GPUs"
        raise ConfigError("workload.least_gpus", part.least_gpus, rule, "lower it")
    times, each = draws.stream("jobs", "time"), draws.stream("jobs", "each")
    end = scenario.days * DAY_SECONDS
    peak_mean = DAY_SECONDS / (part.jobs_per_day / _mean_activity())
    raw: list[tuple[float, int, float, Stream]] = []
    time = 0.0
    while True:
        time += times.exponential(peak_mean)
        if time >= end:
            break
        if times.uniform() < _activity(time):
            luck = each.at(len(raw))
            gpus = _size(sizes, luck.uniform())
            raw.append((time, gpus, _length(gpus, luck), luck))
    # Medians are published, means are not: the mean follows from the load that is.
    asked = sum(gpus * length for _, gpus, length, _ in raw)
    scale = part.utilisation * fleet.gpus * end / asked if asked else 1.0
    return [
        (ns(time), _spec(scenario, gpus, length * scale, luck, number))
        for number, (time, gpus, length, luck) in enumerate(raw)
    ]


def _spec(scenario: Scenario, gpus: int, seconds: float, luck: Stream, number: int) -> JobSpec:
    part = scenario.workload
    steps = max(1, round(seconds / scenario.job.step_seconds))
    fails = luck.chance(part.user_error_share)
    team = luck.below(part.teams)
    return JobSpec(
        name=f"job-{number}",
        user=f"user-{team}-{luck.below(12)}",
        team=f"team-{team}",
        gang=gang(gpus, scenario.fleet.node_gpus),
        expected=expected_of(scenario, steps),
        preemptible=luck.chance(part.preemptible_share),
        payload=f"{USER_ERROR}{1 + luck.below(steps)}" if fails else "",
    )


def gang(gpus: int, node_gpus: int) -> GangShape:
    """Data-parallel ranks on parts of a node or on whole ones."""
    if gpus <= node_gpus:
        return GangShape(replicas=1, tensor=gpus, slot_gpus=gpus)
    return GangShape(
        replicas=-(-gpus // node_gpus), tensor=node_gpus, slot_gpus=node_gpus, whole_nodes=True
    )


def _size(sizes: list[tuple[int, float]], point: float) -> int:
    left = point * sum(share for _, share in sizes)
    for gpus, share in sizes:
        left -= share
        if left < 0:
            return gpus
    return sizes[-1][0]


def _length(gpus: int, luck: Stream) -> float:
    median, sigma = next((m, s) for most, m, s in LENGTHS if gpus <= most)
    return min(luck.lognormal(median, sigma), LONGEST_SECONDS)


def _activity(seconds: float) -> float:
    """How busy people are, of their busiest: by hour of the day and day of the week."""
    hour = seconds % DAY_SECONDS / 3600
    daily = NIGHT_SHARE + (1 - NIGHT_SHARE) * (0.5 - 0.5 * math.cos(2 * math.pi * (hour - 3) / 24))
    weekend = int(seconds // DAY_SECONDS) % 7 >= 5
    return daily * (WEEKEND_SHARE if weekend else 1.0)


def _mean_activity() -> float:
    hours = range(7 * 24)
    return sum(_activity(hour * 3600.0) for hour in hours) / len(hours)


# Recorded traces.

COLUMNS = {
    "submit": ("submit_time", "submitted", "submit", "submitted_time"),
    "seconds": ("duration", "seconds", "run_time", "runtime"),
    "gpus": ("gpu_num", "gpus", "num_gpus", "gpu"),
    "user": ("user",),
    "team": ("team", "vc", "queue", "group"),
}


def recorded(scenario: Scenario) -> list[Submission]:
    """The jobs of a CSV file (Acme, Philly and Helios name their columns alike)."""
    key, path = "workload.file", Path(scenario.workload.file)
    if not scenario.workload.file:
        raise ConfigError(key, "", "a recorded trace needs a file", "e.g. trace.csv")
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return _rows(scenario, path, csv.DictReader(file))
    except FileNotFoundError:
        raise ConfigError(key, str(path), "no such file", "give the path of a CSV file") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        rule = f"cannot be read: {error}"
        raise ConfigError(key, str(path), rule, "save it as CSV in UTF-8") from None


def _rows(scenario: Scenario, path: Path, rows: csv.DictReader[str]) -> list[Submission]:
    names = {key: _column(path, rows.fieldnames or [], key) for key in COLUMNS}
    found: list[tuple[float, JobSpec]] = []
    for number, row in enumerate(rows, start=2):
        try:
            when = _seconds(row[names["submit"]])
            length, gpus = float(row[names["seconds"]]), int(float(row[names["gpus"]]))
        except (ValueError, TypeError, KeyError) as error:
            fix = "give seconds or ISO dates, and numbers"
            where, rule = f"{path}:{number}", f"bad row: {error}"
            raise ConfigError("workload.file", where, rule, fix) from None
        if length <= 0 or gpus < max(1, scenario.workload.least_gpus):
            continue  # CPU jobs and those that never ran
        if gpus > scenario.fleet.gpus:
            continue
        steps = max(1, round(length / scenario.job.step_seconds))
        spec = JobSpec(
            name=f"row-{number}",
            user=row.get(names["user"], "") or "",
            team=row.get(names["team"], "") or "default",
            gang=gang(gpus, scenario.fleet.node_gpus),
            expected=expected_of(scenario, steps),
        )
        found.append((when, spec))
    if not found:
        rule = "has no GPU job that fits the fleet"
        raise ConfigError("workload.file", str(path), rule, "set fleet.gpus")
    first = min(when for when, _ in found)
    return sorted(
        ((ns(when - first), spec) for when, spec in found),
        key=lambda entry: entry[0],
    )


def _column(path: Path, header: Iterable[str], key: str) -> str:
    known = list(header)
    for name in COLUMNS[key]:
        if name in known:
            return name
    if key in ("user", "team"):
        return ""
    rule = f"has no column for {key}; one of {', '.join(COLUMNS[key])}"
    raise ConfigError("workload.file", str(path), rule, did_you_mean(COLUMNS[key][0], known))


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()
