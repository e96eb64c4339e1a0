"""Fits the efficiency constants to measured runs, and says what they are worth for others.

Each project is predicted once more by constants that were fitted without it: with its software's
traits, and as if nobody had named its software. The intervals of those predictions are measured on
the other projects alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct, structs

from phalanx.config import ConfigError
from phalanx.plan.cost.constants import Constants
from phalanx.plan.cost.uncertainty import Z80
from phalanx.plan.evidence.columns import unread_columns
from phalanx.plan.evidence.fit import CalibrationFit, LeftOut, knobs_of, prior_constants, unnamed
from phalanx.plan.evidence.memory_readings import (
    MemoryErrors,
    memory_errors,
    memory_row,
    with_activation_shares,
)
from phalanx.plan.evidence.ordering import Ordering, ordering_of
from phalanx.plan.evidence.published import PublishedRun, parse_runs, read_table
from phalanx.plan.evidence.replay import Replay
from phalanx.plan.evidence.spreads import with_spreads
from phalanx.plan.grid import Bools, Floats


class Calibration(Struct, frozen=True, kw_only=True):
    """Fitted constants, and how they predict projects that they have not seen."""

    constants: Constants
    runs: int
    left_out: dict[str, dict[str, float]]  # project -> n, mape, median, bias
    unseen: dict[str, dict[str, float]]  # the same with the software unnamed, and its coverage80
    ordering: Ordering | None  # of mappings of a project that was left out
    unseen_ordering: Ordering | None  # and unnamed
    mape: float  # over all dense runs, each predicted without its project
    median: float
    unseen_memory: MemoryErrors | None = None  # of all runs with the software unnamed
    unread: dict[str, int] = {}  # columns that no prediction reads, and rows that fill them


def calibrate(path: Path) -> Calibration:
    """Fit the constants to a CSV of runs, validated by leaving out one project at a time."""
    rows = read_table(path)
    runs, skipped = parse_runs(rows, assume=True)
    timed = [run for run in runs if run.seconds is not None]
    if not timed:
        why = f" (line {skipped[0].row}: {skipped[0].reason})" if skipped else ""
        fix = "give runs with their time; `phalanx plan check` says what each row lacks"
        raise ConfigError("file", str(path), f"no run of it can be compared{why}", fix)
    found = calibrate_runs(timed)
    complete = [run for run in runs if run.complete]
    constants = with_activation_shares(found.constants, complete)
    held = memory_errors([memory_row(unnamed(run), constants) for run in complete])
    return structs.replace(
        found, constants=constants, unseen_memory=held, unread=unread_columns(rows)
    )


def calibrate_runs(runs: Sequence[PublishedRun]) -> Calibration:
    """The same for runs that are at hand already: dense ones first, then experts on top."""
    fitted, without = prior_constants(), dict[str, Constants]()
    left_out = LeftOut(np.full(len(runs), np.nan), np.full(len(runs), np.nan))
    kinds = np.array([run.kind for run in runs])
    for architecture in ("dense", "moe"):
        chosen = np.flatnonzero(kinds == architecture).tolist()
        if len(chosen):
            fit = CalibrationFit([runs[i] for i in chosen], fitted, knobs_of(architecture), without)
            fitted, errors = fit.validated()
            without = fit.bases
            left_out.named[chosen], left_out.unnamed[chosen] = errors.named, errors.unnamed
    counted = np.array([run.kind == "dense" and run.complete for run in runs])
    relative = np.abs(np.expm1(left_out.named[counted]))
    projects = np.array([run.project for run in runs])
    spreads = _unseen_spreads(fitted, runs, left_out, projects)
    covered = np.abs(left_out.unnamed) <= Z80 * spreads.unnamed
    seen, unseen = {}, {}
    for project, architecture in sorted(set(zip(projects.tolist(), kinds.tolist(), strict=True))):
        rows = (projects == project) & (kinds == architecture)
        seen[f"{project}:{architecture}"] = summary(left_out.named[rows])
        unseen[f"{project}:{architecture}"] = summary(left_out.unnamed[rows], covered[rows])
    for architecture in sorted(set(kinds.tolist())):
        rows = kinds == architecture
        unseen[architecture] = summary(left_out.unnamed[rows], covered[rows])
    return Calibration(
        constants=with_spreads(fitted, runs, left_out),
        runs=len(runs),
        left_out=seen,
        unseen=unseen,
        ordering=ordering_of(runs, left_out.named, spreads.named),
        unseen_ordering=ordering_of(
            [unnamed(run) for run in runs], left_out.unnamed, spreads.unnamed
        ),
        mape=float(np.mean(relative)) if len(relative) else float("nan"),
        median=float(np.median(relative)) if len(relative) else float("nan"),
    )


def _unseen_spreads(
    fitted: Constants, runs: Sequence[PublishedRun], left_out: LeftOut, projects: Floats
) -> LeftOut:
    """The spread of each run's predictions that all other projects would give it."""
    spreads = LeftOut(np.zeros(len(runs)), np.zeros(len(runs)))
    for project in sorted(set(projects.tolist())):
        others = np.flatnonzero(projects != project).tolist()
        own = np.flatnonzero(projects == project).tolist()
        constants = fitted
        if len(others):
            rest = [runs[index] for index in others]
            constants = with_spreads(fitted, rest, left_out.take(projects != project))
        same = [runs[index] for index in own]
        spreads.named[own] = Replay(same).price(constants)[1]
        spreads.unnamed[own] = Replay([unnamed(run) for run in same]).price(constants)[1]
    return spreads


def summary(errors: Floats, covered: Bools | None = None) -> dict[str, float]:
    """n, mape, median and bias of log(predicted / measured), and the share that is covered."""
    relative = np.expm1(errors)
    found = {
        "n": float(len(errors)),
        "mape": float(np.mean(np.abs(relative))),
        "median": float(np.median(np.abs(relative))),
        "bias": float(np.mean(relative)),
    }
    return found if covered is None else found | {"coverage80": float(np.mean(covered))}
