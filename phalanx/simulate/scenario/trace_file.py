"""Files of recorded jobs: Philly, Helios, Acme and Slurm's ``sacct -P``, by the names of columns.

A row that cannot be understood is kept with its line and the reason, and never dropped in silence.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from msgspec import Struct

from phalanx.config.errors import ConfigError, did_you_mean, plain_reason
from phalanx.simulate.scenario.scenario import MOST_SECONDS

# Names of columns without regard to case, the best first. Reduced Philly: timestamp, duration,
# num_gpus, cluster. Helios: vc, gpu_num, submit_time, start_time, end_time. Acme: the same with
# type in place of vc. Slurm: Account, Submit, Start, End, ElapsedRaw, Timelimit, AllocTRES.
COLUMNS = {
    "submit": ("submit_time", "submitted", "submit", "submitted_time", "timestamp"),
    "start": ("start_time", "start"),
    "end": ("end_time", "end"),
    "seconds": ("duration", "seconds", "run_time", "runtime", "elapsedraw", "elapsed"),
    "gpus": ("gpu_num", "gpus", "num_gpus", "gpu", "alloctres", "reqtres"),
    "asked": ("reqtres",),
    "user": ("user",),
    "team": ("team", "vc", "account", "group", "queue", "cluster", "type", "partition"),
    "limit": ("timelimitraw", "timelimit"),
    "job": ("job_id", "jobid", "jobidraw"),
}
MOST_GPUS = 10**7  # of a row; more is a slip of the hand
MOST_STAMP = 1e11  # seconds: the year 5138; a time since 1970 in milliseconds is more
UNKNOWN = ("", "unknown", "none", "n/a", "null")  # in place of a time that never came
NO_LIMIT = (*UNKNOWN, "unlimited", "partition_limit", "invalid")
STEPS = "are steps of a job"
REPEATED = "repeat an earlier row, its job's number included"
CLOCK = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+(?:\.\d+)?)")  # [days-][hours:]minutes:seconds
GPUS_OF_TRES = re.compile(r"gres/gpu(:[^=,]+)?=(\d+)")


class RecordedJob(Struct, frozen=True):
    """One row."""

    line: int
    submit: float  # seconds since some beginning
    seconds: float  # that it ran; 0: it never did
    gpus: int
    user: str
    team: str
    limit: float = 0.0  # its time limit in seconds; 0: none


class TraceFile(Struct):
    """The rows of a file."""

    path: str
    jobs: list[RecordedJob]
    skipped: dict[str, int]  # rows that are no jobs, by reason
    unreadable: list[str]  # "file:line: why", one for each row that cannot be understood


def read_trace(path: Path, key: str = "workload.file") -> TraceFile:
    """All rows of a file; one that is no trace at all is refused under ``key``."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            separator = max("|\t;,", key=header.count)
            file.seek(0)
            # sacct -P does not quote: a quotation mark is part of the name of a job.
            quoting: Literal[0, 3] = csv.QUOTE_NONE if separator == "|" else csv.QUOTE_MINIMAL
            rows = csv.DictReader(file, delimiter=separator, quoting=quoting)
            return _rows(path, rows, key)
    except FileNotFoundError:
        raise ConfigError(key, str(path), "no such file", "give the path of a CSV file") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        rule = f"cannot be read: {plain_reason(error)}"
        raise ConfigError(key, str(path), rule, "save it as CSV in UTF-8") from None


def _rows(path: Path, rows: csv.DictReader[str], key: str) -> TraceFile:
    header = _header(path, rows, key)
    rows.fieldnames = header
    names = {column: _column(header, column) for column in COLUMNS}
    missing = [column for column in ("submit", "gpus") if not names[column]]
    if not names["seconds"] and not (names["start"] and names["end"]):
        missing.append("seconds")
    for column in missing:
        rule = f"has no column for {column}; one of {', '.join(COLUMNS[column])}"
        raise ConfigError(key, str(path), rule, did_you_mean(COLUMNS[column][0], header))
    trace = TraceFile(str(path), [], {}, [])
    dated: bool | None = None
    seen: set[tuple[str, ...]] = set()
    for row in rows:
        cells = [cell for cell in row.values() if isinstance(cell, str)]
        broken = sum(cell.count("\n") for cell in cells)
        line = rows.line_num - broken + any(cell.endswith("\n") for cell in cells)
        if "." in (row.get(names["job"]) or ""):  # sacct: 123.batch, 123.0
            trace.skipped[STEPS] = trace.skipped.get(STEPS, 0) + 1
            continue
        try:
            _whole(row, broken)
            if names["job"]:
                if tuple(cells) in seen:
                    trace.skipped[REPEATED] = trace.skipped.get(REPEATED, 0) + 1
                    continue
                seen.add(tuple(cells))
            if dated is None:
                dated = _is_date(row[names["submit"]])
            if dated != _is_date(row[names["submit"]]):
                raise ValueError("seconds and dates in one column")
            trace.jobs.append(_job(row, names, line))
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            trace.unreadable.append(f"{path}:{line}: {error}")
    return trace


def _header(path: Path, rows: csv.DictReader[str], key: str) -> list[str]:
    """The names of columns, as COLUMNS has them."""
    header = [name.strip().lower() for name in rows.fieldnames or []]
    if not any(header):
        rule = "has no names of columns in its first line"
        raise ConfigError(key, str(path), rule, "e.g. timestamp,duration,num_gpus")
    for name in filter(None, header):
        if header.count(name) > 1:
            rule = f"has the column {name!r} {header.count(name)} times"
            raise ConfigError(key, str(path), rule, "keep one of them")
    return header


def _whole(row: dict[str, str], broken: int) -> None:
    """Refuses a row that a stray quotation mark or separator has made of others' cells."""
    if broken:
        raise ValueError(f"a quotation mark opens here and takes in {broken} lines more")
    beyond: Iterable[str] = row.pop(None, ())  # type: ignore[call-overload]
    if any(beyond):
        raise ValueError("it has more cells than the first line names")


def _job(row: dict[str, str], names: dict[str, str], line: int) -> RecordedJob:
    return RecordedJob(
        line=line,
        submit=_seconds(row[names["submit"]]),
        seconds=_ran(row, names),
        gpus=_gpus(row, names),
        user=row.get(names["user"]) or "",
        team=row.get(names["team"]) or "default",
        limit=_limit(names["limit"], row.get(names["limit"]) or ""),
    )


def _column(header: Iterable[str], column: str) -> str:
    """The name of a column in a file; "": it has none."""
    names = list(header)
    for name in COLUMNS[column]:
        if name == "queue" and _first(names, "start"):
            continue  # Helios and Acme: how long the job waited there
        if name in names:
            return name
    return ""


def _first(known: list[str], column: str) -> str:
    return next((name for name in COLUMNS[column] if name in known), "")


def _ran(row: dict[str, str], names: dict[str, str]) -> float:
    """How long a job ran, by its own time stamps where it has both."""
    stamps = [(row.get(names[column]) or "").strip() for column in ("start", "end")]
    if all(stamp.lower() not in UNKNOWN for stamp in stamps):
        first, last = map(_seconds, stamps)
        return _number(str(last - first), MOST_SECONDS)
    if not names["seconds"]:
        return 0.0
    text = row[names["seconds"]]
    if text is not None and text.strip().lower() in UNKNOWN and names["start"]:
        return 0.0
    return _length(text)


def _gpus(row: dict[str, str], names: dict[str, str]) -> int:
    """A number of GPUs, or what Slurm says of trackable resources: nothing, where none were had."""
    text = row[names["gpus"]]
    if names["asked"] and not text:
        text = row[names["asked"]]
    if text is not None and names["gpus"].endswith("tres"):
        asked = {kind: int(count) for kind, count in GPUS_OF_TRES.findall(text)}
        return asked.get("", sum(asked.values()))
    gpus = _number(text, MOST_GPUS)
    if not gpus.is_integer():
        raise ValueError(f"{text!r} is no whole number of GPUs")
    return int(gpus)


def _limit(name: str, text: str) -> float:
    if text.strip().lower() in NO_LIMIT:
        return 0.0
    if name == "timelimitraw":
        return 60 * _number(text, MOST_SECONDS)
    return _length(text)


def _length(text: str | None) -> float:
    """Seconds, or Slurm's [days-]hours:minutes:seconds."""
    clock = CLOCK.fullmatch(text.strip()) if text is not None else None
    if clock is None:
        return _number(text, MOST_SECONDS)
    days, hours, minutes, seconds = (float(part or 0) for part in clock.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _number(text: str | None, most: float) -> float:
    if text is None:
        raise ValueError("it ends too early")
    if not text.strip():
        raise ValueError("a cell that must have a number is blank")
    number = float(text)
    if not math.isfinite(number) or not 0 <= number <= most:
        bounds = "from 0 up" if math.isinf(most) else f"from 0 up to {most:g}"
        raise ValueError(f"{text!r} is not a number {bounds}")
    return number


def _is_date(text: str | None) -> bool:
    return text is not None and "-" in text[1:] and "e" not in text.lower()


def _seconds(text: str | None) -> float:
    """Seconds since some beginning, or a date: one without a zone is taken for UTC."""
    if text is None or not _is_date(text):
        stamp = _number(text, math.inf)
        if stamp > MOST_STAMP:
            raise ValueError(f"{text!r} is too late for seconds; divide milliseconds by 1000")
        return stamp
    when = datetime.fromisoformat(text.strip())
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
