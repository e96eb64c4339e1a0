"""The fit of the efficiency constants to measured runs.

Each constant has a prior from data sheets and microbenchmarks and how far it may move from it
(in log units). The fit is the most probable set of constants: Gauss-Newton on

    sum over runs  weight * ((log(predicted / measured) + offset of its project) / noise)^2
    + sum over constants  shift^2  +  sum over projects  (offset / 0.05)^2

with Huber weights against outliers. A project's software is a few percent faster or slower as a
whole; its offset takes that up, so that a long table cannot pull the physics.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from copy import copy
from importlib import resources
from typing import Any

import numpy as np
from msgspec import Struct, structs

from phalanx.plan.cost.constants import Constants
from phalanx.plan.evidence.published import PublishedRun
from phalanx.plan.evidence.replay import Replay
from phalanx.plan.grid import Bools, Floats
from phalanx.plan.machine import family_of
from phalanx.plan.stacks import typical_software

NOISE = 0.06
OFFSET_WIDTH = 0.05
HUBER = 1.5  # deviations beyond which a run counts linearly
ROUNDS = 6
STEP = 0.05  # of a prior's width, for derivatives
LEAST_PROJECTS = 3
SHARES = ("matmul", "attention", "memory")  # of what the data sheet promises: all of it at most
# Spreads before any run is seen: of runs, between stacks, and of traits that nobody named.
PRIOR_SPREADS = {"dense": 0.08, "moe": 0.16, "communication": 0.3}
PRIOR_SPREADS |= {"software:dense": 0.06, "software:moe": 0.12}
PRIOR_SPREADS |= {"unnamed:dense": 0.06, "unnamed:moe": 0.1}


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


class LeftOut(Struct, frozen=True):
    """log(predicted / measured) of runs whose project was left out of the fit."""

    named: Floats  # with the traits of their software
    unnamed: Floats  # with typical ones

    def take(self, rows: Bools) -> LeftOut:
        """Those of some runs."""
        return LeftOut(self.named[rows], self.unnamed[rows])


class CalibrationFit:
    """The least-squares problem over a set of runs.

    ``bases``: by project, what takes the place of ``base`` where that project is left out.
    """

    def __init__(
        self,
        runs: Sequence[PublishedRun],
        base: Constants,
        knobs: Sequence[Knob],
        bases: dict[str, Constants] | None = None,
    ) -> None:
        self.bases = dict(bases or {})
        self.runs, self.base, self.knobs = runs, base, list(knobs)
        self.replay = Replay(runs)
        self.measured = np.log(np.array([run.seconds for run in runs], dtype=np.float64))
        self.projects = sorted({run.project for run in runs})
        member = [[run.project == project for project in self.projects] for run in runs]
        self.member = np.array(member, dtype=np.float64)
        if len(self.projects) < LEAST_PROJECTS:  # an offset would be all there is to see
            self.member[:] = 0.0

    def validated(self) -> tuple[Constants, LeftOut]:
        """The fit to all runs, and each run's errors when its project is left out.

        ``bases`` then has what was fitted without each project.
        """
        everything = np.ones(len(self.runs), dtype=bool)
        shift, jacobian = self.solve(everything, np.zeros(len(self.knobs)), ROUNDS)
        projects = np.array([run.project for run in self.runs])
        left_out = LeftOut(np.full(len(self.runs), np.nan), np.full(len(self.runs), np.nan))
        for project in self.projects:
            others = projects != project
            # The other projects' optimum is near: a few cheap rounds with the same derivatives.
            start = shift if others.any() else np.zeros_like(shift)
            rounds = 3 if others.any() else 0
            fit = self._on(self.bases.get(project, self.base))
            without, _ = fit.solve(others, start, rounds, jacobian)
            self.bases[project] = fit.constants(without)
            chosen = np.flatnonzero(~others).tolist()
            runs = [self.runs[index] for index in chosen]
            for errors, same in (
                (left_out.named, runs),
                (left_out.unnamed, [unnamed(run) for run in runs]),
            ):
                seconds = Replay(same).seconds(self.bases[project])
                errors[chosen] = np.log(seconds) - self.measured[chosen]
        return self.constants(shift), left_out

    def _on(self, base: Constants) -> CalibrationFit:
        """The same problem on other constants beside those that are fitted."""
        twin = copy(self)
        twin.base = base
        return twin

    def constants(self, shift: Floats) -> Constants:
        """Constants that have moved so many widths from their priors."""
        plain: dict[str, float] = {}
        tables: dict[str, dict[str, float]] = {
            "matmul": dict(self.base.matmul),
            "attention": dict(self.base.attention),
        }
        for knob, amount in zip(self.knobs, shift, strict=True):
            value = knob.prior * float(np.exp(knob.width * amount))
            value = min(1.0, value) if knob.field in SHARES else value
            if knob.key:
                tables[knob.field][knob.key] = value
            else:
                plain[knob.field] = value
        return structs.replace(self.base, **plain, **tables)

    def residuals(self, shift: Floats, only: set[str] | None = None) -> Floats:
        """log(predicted / measured) of every run."""
        return np.log(self.replay.seconds(self.constants(shift), only)) - self.measured

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


def knobs_of(kind: str) -> list[Knob]:
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
    priors: dict[str, Any] = {"error": PRIOR_SPREADS}
    for field, entry in _prior_table().items():
        if isinstance(entry, dict):
            priors[field] = {key: pair[0] for key, pair in entry.items()}
        else:
            priors[field] = entry[0]
    return Constants(**priors)


def unnamed(run: PublishedRun) -> PublishedRun:
    """The same run as if nobody had said what software made it."""
    typical = typical_software(family_of(run.cluster.gpu), run.mapping)
    return structs.replace(run, software=typical)
