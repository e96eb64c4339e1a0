"""A checked sweep: its trials, its rungs, and the job of each trial."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from msgspec import Struct

from phalanx.config import Job, job_from_table
from phalanx.config.errors import written
from phalanx.config.load import overridden
from phalanx.plan.sweeps.description import Settings, SweepFile
from phalanx.plan.sweeps.machine import RungShape, SweepMachine
from phalanx.plan.sweeps.space import texts_of

KEY_DIGITS = 8


class SweepPlan(Struct, frozen=True, kw_only=True):
    """What ``check_sweep`` made of a file."""

    sweep: SweepFile
    base: dict[str, Any]  # the job file's table, with the sweep's settings over it
    key: str  # of this sweep among all: another range, job or seed is another sweep
    settings: list[Settings]  # by trial
    shape: RungShape | None  # None: each trial makes the steps of its own job, once

    @property
    def trials(self) -> int:
        """Number of trials."""
        return len(self.settings)

    @property
    def total_steps(self) -> int:
        """Steps of all trials together, at most."""
        if self.shape is not None:
            return self.shape.total_steps
        return sum(self.steps_of(trial, 0) for trial in range(self.trials))

    @property
    def arithmetic(self) -> str:
        """The number of steps as a formula for people."""
        if self.shape is not None:
            before = (0, *self.shape.steps)
            rungs = zip(self.shape.trials, self.shape.steps, before, strict=False)
            sums = " + ".join(f"{count} x {steps - least}" for count, steps, least in rungs)
        else:
            counts: dict[int, int] = {}
            for trial in range(self.trials):
                steps = self.steps_of(trial, 0)
                counts[steps] = counts.get(steps, 0) + 1
            shown = list(counts.items())
            sums = " + ".join(f"{count} x {steps}" for steps, count in shown[:4])
            sums += " + ..." if len(shown) > 4 else ""
        return f"{sums} = {self.total_steps:,} steps"

    def machine(self, at_once: int = 0) -> SweepMachine:
        """The machine that chooses the next trial."""
        rungs = len(self.shape.steps) if self.shape is not None else 1
        return SweepMachine(
            self.trials,
            rungs,
            self.sweep.method.reduction,
            at_once or self.sweep.at_once,
            self.sweep.better,
        )

    def steps_of(self, trial: int, rung: int) -> int:
        """Steps of a trial's run at a rung."""
        if self.shape is not None:
            return self.shape.steps[rung]
        own = self.settings[trial].get("train.steps")
        return int(own) if own is not None else base_steps(self.base)

    def name_of(self, trial: int) -> str:
        """The name of a trial's job and of the folder of its runs, whatever the rung."""
        return f"{self.key}.{trial:05d}"

    def job_of(self, trial: int, rung: int = 0) -> Job:
        """The job of a trial; ConfigError if its settings are invalid."""
        given = [f"{key}={text}" for key, text in texts_of(self.settings[trial]).items()]
        own: Settings = {"name": self.name_of(trial), "checkpoint.resume": "auto"}
        if self.shape is not None:
            own |= {"train.steps": self.shape.steps[rung], "checkpoint.at_end": True}
            schedule = self.base.get("schedule", {})
            if not schedule.get("steps") and not schedule.get("extensions"):
                # At every rung the learning rate is that of the whole run.
                own["schedule.steps"] = self.shape.steps[-1]
        made = [f"{key}={written(value)}" for key, value in own.items()]
        return job_from_table(self.base, [*given, *made])


def base_steps(base: dict[str, Any]) -> int:
    """Steps of the job file's run."""
    return int(base.get("train", {}).get("steps", Job().train.steps))


def base_table(table: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """The job file's table with the sweep's settings over it."""
    texts = [f"{key}={text}" for key, text in texts_of(settings).items()]
    return overridden(table, texts, Job)[0]


def sweep_key(sweep: SweepFile, base: dict[str, Any]) -> str:
    """The sweep's name with a hash of everything that determines its trials."""
    asked = [sweep.parameters, sweep.method, sweep.metric, sweep.better, sweep.ranks]
    content = msgspec.json.encode([msgspec.to_builtins(asked), base], order="sorted")
    return f"{sweep.name}.{hashlib.sha256(content).hexdigest()[:KEY_DIGITS]}"
