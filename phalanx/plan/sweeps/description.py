"""The sweep file: TOML that names a job file and the settings to vary."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from phalanx.config import ConfigError, Section
from phalanx.config.load import read_table
from phalanx.config.section import Minutes, Natural, Positive, RanksOrAuto, Seed
from phalanx.config.tree import build, file_mistakes

Scalar = bool | int | float | str
Settings = dict[str, Scalar]  # by dotted key, as in a job file
Draw = Literal["grid", "random", "sobol"]


class SweepParameter(Section, frozen=True, kw_only=True):
    """The values of one setting: one of values, range and log_range."""

    values: tuple[Scalar | Settings, ...] = ()
    """Values of the setting; or, under any name, tables of settings to change together."""
    range: tuple[int | float, int | float] | None = None
    """Least and largest value, sampled uniformly; integers if both are integers."""
    log_range: tuple[int | float, int | float] | None = None
    """Least and largest value, sampled uniformly in the logarithm."""
    points: Annotated[int, Meta(ge=1, le=10_000)] = 5
    """grid: number of values to try in a range, including both ends."""


class SweepMethod(Section, frozen=True, kw_only=True):
    """How trials are chosen, and which of them are promoted."""

    kind: Literal["grid", "random", "sobol", "asha"] = "grid"
    """All combinations; random ones; a Sobol sequence; or successive halving (ASHA)."""
    trials: Natural = 0
    """Number of trials; 0 with a grid: all of it."""
    seed: Seed = 0
    """random, sobol, asha: seed."""
    draw: Draw = "sobol"
    """asha: how trials are sampled."""
    first_steps: Natural = 0
    """asha: steps of the first rung; the best trials are promoted, finally to train.steps."""
    reduction: Annotated[int, Meta(ge=2, le=100)] = 3
    """asha: reduction factor: one in so many is promoted, to so many times the steps."""


class SweepBudget(Section, frozen=True, kw_only=True):
    """Budget of all trials together; a sweep that could exceed it is refused."""

    gpu_hours: float | None = None
    """GPU-hours, as predicted by the server's planner and as measured."""
    dollars: float | None = None
    """Dollars at the policy's price of a GPU-hour."""
    steps: float | None = None
    """Steps of all trials together."""
    step_seconds: Positive | None = None
    """Duration of a step, instead of the planner's prediction."""


class SweepFile(Section, frozen=True, kw_only=True):
    """A sweep over settings of a job."""

    name: str
    """Of the sweep."""
    job: str
    """Job file, relative to this file's folder."""
    settings: dict[str, Scalar] = {}
    """Settings that override the job file in every trial, by dotted key."""
    parameters: dict[str, SweepParameter]
    """Settings to vary, by dotted key."""
    method: SweepMethod = SweepMethod()
    metric: str = "loss"
    """loss, validation_loss, or the name of a score of [evaluate]; of a trial's last step."""
    better: Literal["lower", "higher"] = "lower"
    """Whether a smaller or a larger value is better."""
    at_once: Annotated[int, Meta(ge=1, le=100_000)] = 4
    """Maximum number of trials queued or running at a time."""
    ranks: RanksOrAuto = 0
    """Ranks of a trial; 0: as in the job file, else one per GPU of a node."""
    minutes: Minutes = 0.0
    """Time limit of a trial's rung; 0: none."""
    team: str = "default"
    """Team that the trials belong to (default: the token's)."""
    qos: str = "normal"
    """Class of service of the trials."""
    budget: SweepBudget = SweepBudget()


def sweep_from_table(table: dict[str, Any]) -> SweepFile:
    """Decode a sweep from a TOML table; ConfigError with every wrong key and type."""
    if problems := file_mistakes(SweepFile, table):
        raise ConfigError.of(problems)
    return build(SweepFile, table)


def read_sweep(path: Path) -> SweepFile:
    """Read a sweep file."""
    return sweep_from_table(read_table(path))
