"""Fits the efficiency constants to measured runs.

Each constant has a prior from data sheets and microbenchmarks and how far it may move from it
(in log units). The fit is the most probable set of constants: Gauss-Newton on

    sum over runs  weight * ((log(predicted / measured) + offset of its project) / noise)^2
    + sum over constants  shift^2  +  sum over projects  (offset / 0.05)^2

with Huber weights against outliers. A project's software is a few percent faster or slower as a
whole; its offset takes that up, so that a long table cannot pull the physics. Predictions are
made without offsets.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, structs

from phalanx.config import ConfigError
from phalanx.plan.cost.constants import Constants
from phalanx.plan.cost.uncertainty import Z80
from phalanx.plan.evidence.columns import unread_columns
from phalanx.plan.evidence.published import PublishedRun, parse_runs, read_table
from phalanx.plan.evidence.replay import Replay
from phalanx.plan.grid import Bools, Floats

NOISE = 0.06
OFFSET_WIDTH = 0.05
HUBER = 1.5  # deviations beyond which a run counts linearly
ROUNDS = 6
STEP = 0.05  # of a prior's width, for derivatives
LEAST_PROJECTS = 3
LEAST_RUNS = 12  # for a spread of a group's own


class Knob(Struct, frozen=True):
    """One constant: where it stands in Constants, its prior, and how far it may move."""

    field: str
    key: str  # in a table; "" for a plain number
    prior: float
    width: float  # of log(value / prior)

    @property
    def family(self) -> str:
        """The only GPU family it concerns; "" for all."""
        return self.key.split(":")[0] if ":" in self.key else ""


class Calibration(Struct, frozen=True, kw_only=True):
    """Fitted constants, and how they predict projects that they have not seen."""

    constants: Constants
    runs: int
    left_out: dict[str, dict[str, float]]  # project -> n, mape, median, bias
    mape: float  # over all dense runs, each predicted without its project
    median: float
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
    return structs.replace(calibrate_runs(timed), unread=unread_columns(rows))


def calibrate_runs(runs: Sequence[PublishedRun]) -> Calibration:
    """The same for runs that are at hand already: dense ones first, then experts on top."""
    constants, errors = prior_constants(), np.full(len(runs), np.nan)
    kinds = np.array([run.kind for run in runs])
    for kind in ("dense", "moe"):
        chosen = np.flatnonzero(kinds == kind).tolist()
        if len(chosen):
            fit = CalibrationFit([runs[i] for i in chosen], constants, _knobs(kind))
            constants, errors[chosen] = fit.validated()
    constants = with_spreads(constants, runs, errors)
    counted = np.array([run.kind == "dense" and run.complete for run in runs])
    projects = np.array([run.project for run in runs])
    relative = np.abs(np.expm1(errors[counted]))
    table = {}
    for project, kind in sorted(set(zip(projects.tolist(), kinds.tolist(), strict=True))):
        table[f"{project}:{kind}"] = summary(errors[(projects == project) & (kinds == kind)])
    return Calibration(
        constants=constants,
        runs=len(runs),
        left_out=table,
        mape=float(np.mean(relative)) if len(relative) else float("nan"),
        median=float(np.median(relative)) if len(relative) else float("nan"),
    )


def summary(errors: Floats) -> dict[str, float]:
    """n, mape, median and bias of log(predicted / measured)."""
    relative = np.expm1(errors)
    return {
        "n": float(len(errors)),
        "mape": float(np.mean(np.abs(relative))),
        "median": float(np.median(np.abs(relative))),
        "bias": float(np.mean(relative)),
    }


def with_spreads(constants: Constants, runs: Sequence[PublishedRun], errors: Floats) -> Constants:
    """Constants whose 80 % interval holds 80 % of the left-out errors.

    The spread is measured by kind, GPU family and precision where there are enough runs; all are
    then scaled together, since exposed communication widens the interval further.
    """
    replay = Replay(runs)
    kinds = [run.kind for run in runs]
    exact = [
        f"{run.kind}:{family}:{run.mapping.precision}"
        for run, family in zip(runs, replay.families(), strict=True)
    ]
    table = dict(constants.error)
    for labels in (kinds, exact):
        for label, count in Counter(labels).items():
            if count >= LEAST_RUNS:
                rows = np.array([one == label for one in labels])
                table[label] = float(np.quantile(np.abs(errors[rows]), 0.8)) / Z80
    for kind in sorted(set(kinds)):
        _, widths = replay.price(structs.replace(constants, error=table))
        rows = np.array([one == kind for one in kinds])
        scale = float(np.quantile(np.abs(errors[rows]) / (Z80 * widths[rows]), 0.8))
        table = {
            label: value * (scale if label.startswith(kind) else 1.0)
            for label, value in table.items()
        }
    return structs.replace(constants, error=table)


class CalibrationFit:
    """The least-squares problem over a set of runs."""

    def __init__(
        self, runs: Sequence[PublishedRun], base: Constants, knobs: Sequence[Knob]
    ) -> None:
        self.runs, self.base, self.knobs = runs, base, list(knobs)
        self.replay = Replay(runs)
        self.measured = np.log(np.array([run.seconds for run in runs], dtype=np.float64))
        self.projects = sorted({run.project for run in runs})
        member = [[run.project == project for project in self.projects] for run in runs]
        self.member = np.array(member, dtype=np.float64)
        if len(self.projects) < LEAST_PROJECTS:  # an offset would be all there is to see
            self.member[:] = 0.0

    def validated(self) -> tuple[Constants, Floats]:
        """The fit to all runs, and each run's error when its project is left out."""
        everything = np.ones(len(self.runs), dtype=bool)
        shift, jacobian = self.solve(everything, np.zeros(len(self.knobs)), ROUNDS)
        projects = np.array([run.project for run in self.runs])
        errors = np.full(len(self.runs), np.nan)
        for project in self.projects:
            others = projects != project
            # The other projects' optimum is near: a few cheap rounds with the same derivatives.
            start = shift if others.any() else np.zeros_like(shift)
            rounds = 3 if others.any() else 0
            without, _ = self.solve(others, start, rounds, jacobian)
            errors[~others] = self.residuals(without)[~others]
        return self.constants(shift), errors

    def constants(self, shift: Floats) -> Constants:
        """Constants that have moved so many widths from their priors."""
        plain: dict[str, float] = {}
        tables: dict[str, dict[str, float]] = {
            "matmul": dict(self.base.matmul),
            "attention": dict(self.base.attention),
        }
        for knob, amount in zip(self.knobs, shift, strict=True):
            value = knob.prior * float(np.exp(knob.width * amount))
            if knob.key:
                tables[knob.field][knob.key] = value
            else:
                plain[knob.field] = value
        return structs.replace(self.base, **plain, **tables)

    def residuals(self, shift: Floats, only: set[str] | None = None) -> Floats:
        """log(predicted / measured) of every run."""
        seconds, _ = self.replay.price(self.constants(shift), only)
        return np.log(seconds) - self.measured

    def jacobian(self, shift: Floats, here: Floats) -> Floats:
        """Derivatives of the residuals by finite differences."""
        columns = []
        for index, knob in enumerate(self.knobs):
            moved = shift.copy()
            moved[index] += STEP
            there = self.residuals(moved, {knob.family} if knob.family else None)
            columns.append(np.where(np.isnan(there), 0.0, (there - here) / STEP))
        return np.stack(columns, axis=1)

    def solve(
        self, rows: Bools, start: Floats, rounds: int, jacobian: Floats | None = None
    ) -> tuple[Floats, Floats]:
        """Most probable shift for these runs; a given Jacobian is reused instead of renewed."""
        shift, offsets = start, np.zeros(len(self.projects))
        fresh = jacobian is None
        for turn in range(rounds):
            here = self.residuals(shift)
            if fresh and turn < rounds - 2:  # the last rounds only polish
                jacobian = self.jacobian(shift, here)
            assert jacobian is not None
            member = self.member[rows] * OFFSET_WIDTH
            scaled = (here[rows] + member @ offsets) / NOISE
            weight = np.minimum(1.0, HUBER / np.maximum(np.abs(scaled), 1e-9))
            matrix = np.concatenate((jacobian[rows], member), axis=1) / NOISE
            unknown = np.concatenate((shift, offsets))
            normal = matrix.T @ (weight[:, None] * matrix) + np.eye(len(unknown))
            slope = matrix.T @ (weight * scaled) + unknown
            unknown = unknown - np.clip(np.linalg.solve(normal, slope), -1.0, 1.0)
            shift, offsets = unknown[: len(shift)], unknown[len(shift) :]
        assert jacobian is not None
        return shift, jacobian


def _knobs(kind: str) -> list[Knob]:
    """The constants that runs of a kind decide, from ``data/priors.toml``."""
    knobs = []
    for field, entry in _prior_table().items():
        if isinstance(entry, dict):
            if kind == "dense":
                knobs += [Knob(field, key, *pair) for key, pair in entry.items()]
        elif field.startswith("expert_") == (kind == "moe"):
            knobs.append(Knob(field, "", *entry))
    return [knob for knob in knobs if knob.key != "default"]


def _prior_table() -> dict[str, Any]:
    text = resources.files("phalanx.plan").joinpath("data/priors.toml").read_text("utf-8")
    return tomllib.loads(text)


def prior_constants() -> Constants:
    """The constants before any run is seen."""
    priors: dict[str, Any] = {"error": {"dense": 0.1, "moe": 0.2, "communication": 0.3}}
    for field, entry in _prior_table().items():
        if isinstance(entry, dict):
            priors[field] = {key: pair[0] for key, pair in entry.items()}
        else:
            priors[field] = entry[0]
    return Constants(**priors)
