"""Recorded traces: the jobs of a CSV file (Acme, Philly and Helios name their columns alike)."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

from phalanx.cluster.jobs.job import JobSpec
from phalanx.config.errors import ConfigError, did_you_mean
from phalanx.simulate.scenario.scenario import MOST_SECONDS, Scenario
from phalanx.simulate.scenario.shape import expected_of, gang, ns

COLUMNS = {
    "submit": ("submit_time", "submitted", "submit", "submitted_time"),
    "seconds": ("duration", "seconds", "run_time", "runtime"),
    "gpus": ("gpu_num", "gpus", "num_gpus", "gpu"),
    "user": ("user",),
    "team": ("team", "vc", "queue", "group"),
}
MOST_GPUS = 10**7  # of a row; more is a slip of the hand

# Rows that are not played, by reason.
NO_GPUS = "ask for no GPU"
NO_TIME = "never ran"
SMALL = "ask for fewer than workload.least_gpus"
LARGE = "ask for more GPUs than the fleet has"
LATE = "come after the last day"


class Trace(Struct):
    """What a file asks for, and how many of its rows are left out, by reason."""

    jobs: list[tuple[int, JobSpec]]  # in order of their time
    left_out: dict[str, int]


def recorded(scenario: Scenario) -> Trace:
    """The jobs of the scenario's file."""
    key, path = "workload.file", Path(scenario.workload.file)
    if not scenario.workload.file:
        raise ConfigError(key, "", "a recorded trace needs a file", "e.g. trace.csv")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _rows(scenario, path, csv.DictReader(file))
    except FileNotFoundError:
        raise ConfigError(key, str(path), "no such file", "give the path of a CSV file") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        rule = f"cannot be read: {error}"
        raise ConfigError(key, str(path), rule, "save it as CSV in UTF-8") from None


def _rows(scenario: Scenario, path: Path, rows: csv.DictReader[str]) -> Trace:
    names = {key: _column(path, rows.fieldnames or [], key) for key in COLUMNS}
    read: list[tuple[float, float, int, dict[str, str], int]] = []
    dates = None
    for number, row in enumerate(rows, start=2):
        try:
            if dates is None:
                dates = _is_date(row[names["submit"]])
            if dates != _is_date(row[names["submit"]]):
                raise ValueError("seconds and dates in one column")
            when = _seconds(row[names["submit"]])
            length = _number(row[names["seconds"]], MOST_SECONDS)
            gpus = _whole(row[names["gpus"]])
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            fix = "give seconds or ISO dates, and numbers"
            where, rule = f"{path}:{number}", f"bad row: {error}"
            raise ConfigError("workload.file", where, rule, fix) from None
        read.append((when, length, gpus, row, number))
    first = min((when for when, *_ in read), default=0.0)
    trace = Trace([], {})
    for when, length, gpus, row, number in read:
        why = _left_out(scenario, when - first, length, gpus)
        if why:
            trace.left_out[why] = trace.left_out.get(why, 0) + 1
            continue
        steps = max(1, round(length / scenario.job.step_seconds))
        spec = JobSpec(
            name=f"row-{number}",
            user=row.get(names["user"]) or "",
            team=row.get(names["team"]) or "default",
            gang=gang(gpus, scenario.fleet.node_gpus),
            expected=expected_of(scenario, steps),
        )
        trace.jobs.append((ns(when - first), spec))
    if not trace.jobs:
        told = "; ".join(f"{count} {why}" for why, count in trace.left_out.items())
        rule = f"has no GPU job that can be played ({told or 'it has no rows'})"
        fix = "set fleet.gpus, days or workload.least_gpus"
        raise ConfigError("workload.file", str(path), rule, fix)
    trace.jobs.sort(key=lambda entry: entry[0])
    return trace


def _left_out(scenario: Scenario, seconds: float, length: float, gpus: int) -> str:
    """Why a row is not played; "": it is."""
    if gpus <= 0:
        return NO_GPUS
    if length <= 0:
        return NO_TIME
    if gpus < scenario.workload.least_gpus:
        return SMALL
    nodes = scenario.fleet.gpus // scenario.fleet.node_gpus
    if gpus > nodes * scenario.fleet.node_gpus:
        return LARGE
    return LATE if seconds > scenario.days * 86400 else ""


def _column(path: Path, header: Iterable[str], key: str) -> str:
    known = list(header)
    for name in COLUMNS[key]:
        if name in known:
            return name
    if key in ("user", "team"):
        return ""
    rule = f"has no column for {key}; one of {', '.join(COLUMNS[key])}"
    raise ConfigError("workload.file", str(path), rule, did_you_mean(COLUMNS[key][0], known))


def _number(text: str | None, most: float) -> float:
    if text is None:
        raise ValueError("it ends too early")
    found = float(text)
    if not math.isfinite(found) or not 0 <= found <= most:
        raise ValueError(f"{text!r} is not a number from 0 up to {most:g}")
    return found


def _whole(text: str | None) -> int:
    found = _number(text, MOST_GPUS)
    if not found.is_integer():
        raise ValueError(f"{text!r} is no whole number of GPUs")
    return int(found)


def _is_date(text: str | None) -> bool:
    return text is not None and "-" in text[1:] and "e" not in text.lower()


def _seconds(text: str | None) -> float:
    """Seconds since some beginning, or a date: one without a zone is taken for UTC."""
    if text is None or not _is_date(text):
        return _number(text, math.inf)
    when = datetime.fromisoformat(text)
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
