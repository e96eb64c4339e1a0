"""A trial, what is asked of the next one, and what all of them come to."""

from __future__ import annotations

import statistics
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct

from phalanx.plan.tune.comparison import Comparison
from phalanx.plan.tune.settings import Choice, Value


class Phase(StrEnum):
    """What a trial is for."""

    BASELINE = "baseline"
    EXPLORE = "explore"
    RACE = "race"
    COMPARE = "compare"


class TrialFailure(StrEnum):
    """Why a trial measured nothing."""

    NONE = ""
    MEMORY = "memory"
    OTHER = "other"


class Trial(Struct, frozen=True, kw_only=True):
    """One measured choice; a line of the journal."""

    number: int
    phase: Phase
    values: dict[str, Value]
    step_seconds: tuple[float, ...] = ()  # without those of warming up
    failure: TrialFailure = TrialFailure.NONE
    reason: str = ""  # of the failure, in words
    predicted_seconds: float | None = None
    took_seconds: float  # of the budget

    @property
    def seconds(self) -> float:
        """Of a usual step."""
        return statistics.median(self.step_seconds)


class PredictedStep(NamedTuple):
    """What the planner says of a choice that can run; zeros: nothing."""

    seconds: float = 0.0
    held_bytes: float = 0.0
    limit_bytes: float = 0.0


class TuningBudget(Struct, frozen=True, kw_only=True):
    """What a search may take."""

    trials: int = 40
    seconds: float = 600.0


class NextTrial(NamedTuple):
    """What to measure now."""

    choice: Choice
    phase: Phase


class TuningOutcome(Struct, frozen=True, kw_only=True):
    """What a search came to."""

    values: dict[str, Value]  # the job's settings from now on
    changed: bool
    comparison: Comparison | None  # of the chosen settings with the original ones
    reason: str
