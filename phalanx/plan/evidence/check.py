"""Predicted against measured: the error table of a CSV of published runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct, structs

from phalanx.plan.cost.constants import Constants, shipped
from phalanx.plan.cost.uncertainty import Z80
from phalanx.plan.evidence.columns import unread_columns
from phalanx.plan.evidence.memory_readings import (
    MemoryErrors,
    MemoryRow,
    memory_errors,
    memory_row,
)
from phalanx.plan.evidence.ordering import Ordering, ordering_of
from phalanx.plan.evidence.published import PublishedRun, Skipped, parse_runs, read_table
from phalanx.plan.evidence.replay import Replay
from phalanx.plan.grid import Floats


class CheckedRow(Struct, frozen=True, kw_only=True):
    """One run beside its prediction; fractions, not percents."""

    row: int
    source: str
    project: str
    kind: str
    gpus: int
    predicted_seconds: float
    low_seconds: float
    high_seconds: float
    measured_seconds: float
    error: float  # predicted over measured, less 1
    covered: bool


class Errors(Struct, frozen=True, kw_only=True):
    """Errors of a group of runs, as fractions; NaN (in JSON null) where it has no runs."""

    n: int
    mape: float
    median: float
    bias: float
    coverage80: float


class CheckReport(Struct, frozen=True, kw_only=True):
    """The whole comparison."""

    groups: dict[str, Errors]
    by_source: dict[str, Errors]  # the source strings of one project count as one
    ordering: Ordering | None  # of mappings that were measured side by side
    rows: tuple[CheckedRow, ...]
    memory: MemoryErrors | None
    memory_rows: tuple[MemoryRow, ...]
    skipped: tuple[Skipped, ...]
    assumed: dict[str, int]  # what rows contradict or leave open, and how many do
    unread: dict[str, int]  # columns that no prediction reads, and rows that fill them


def check_rows(path: Path, constants: Constants | None = None) -> CheckReport:
    """Compare every run of a CSV file with its prediction."""
    rows = read_table(path)
    runs, skipped = parse_runs(rows)
    return structs.replace(check_runs(runs, skipped, constants), unread=unread_columns(rows))


def check_runs(
    runs: Sequence[PublishedRun], skipped: Sequence[Skipped], constants: Constants | None = None
) -> CheckReport:
    """The same for runs that are at hand already."""
    constants = constants or shipped()
    timed = [run for run in runs if run.seconds is not None]
    rows = _checked(timed, constants)
    groups = {
        "dense": [row for row in rows if row.kind == "dense"],
        "moe": [row for row in rows if row.kind == "moe"],
        "all": rows,
    }
    projects = {row.project: [one for one in rows if one.project == row.project] for row in rows}
    held = [memory_row(run, constants) for run in runs]
    return CheckReport(
        groups={name: _errors(members) for name, members in groups.items()},
        by_source={name: _errors(members) for name, members in sorted(projects.items())},
        ordering=_ordering(timed, rows),
        rows=tuple(rows),
        memory=memory_errors(held) if held else None,
        memory_rows=tuple(held),
        skipped=tuple(skipped),
        assumed=dict(Counter(words for run in runs for words in run.assumed).most_common()),
        unread={},
    )


def _checked(runs: Sequence[PublishedRun], constants: Constants) -> list[CheckedRow]:
    seconds, spreads = Replay(runs).price(constants)
    rows = []
    for run, predicted, spread in zip(runs, seconds.tolist(), spreads.tolist(), strict=True):
        assert run.seconds is not None
        width = float(np.exp(Z80 * spread))
        rows.append(
            CheckedRow(
                row=run.row,
                source=run.source,
                project=run.project,
                kind=run.kind,
                gpus=run.mapping.gpus,
                predicted_seconds=predicted,
                low_seconds=predicted / width,
                high_seconds=predicted * width,
                measured_seconds=run.seconds,
                error=predicted / run.seconds - 1,
                covered=predicted / width <= run.seconds <= predicted * width,
            )
        )
    return rows


def _ordering(runs: Sequence[PublishedRun], rows: Sequence[CheckedRow]) -> Ordering | None:
    widths = np.log([row.high_seconds / row.predicted_seconds for row in rows]) / Z80
    return ordering_of(runs, np.log1p([row.error for row in rows]), widths)


def _errors(rows: Sequence[CheckedRow]) -> Errors:
    if not rows:
        nothing = float("nan")
        return Errors(n=0, mape=nothing, median=nothing, bias=nothing, coverage80=nothing)
    errors: Floats = np.array([row.error for row in rows])
    return Errors(
        n=len(rows),
        mape=float(np.mean(np.abs(errors))),
        median=float(np.median(np.abs(errors))),
        bias=float(np.mean(errors)),
        coverage80=float(np.mean([row.covered for row in rows])),
    )
