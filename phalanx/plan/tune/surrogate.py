"""What is believed of every choice of settings: the planner's prediction, corrected by trials.

log(step seconds) = log(predicted) + a common error + an error of each setting's value + one of the
choice itself + noise, all normal: a Gaussian process whose covariance is the sum of these. A trial
of micro-batch 4 so says something of every choice with micro-batch 4, and half as much of 2 and 8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import Struct

from phalanx.plan.grid import Floats
from phalanx.plan.tune.settings import Choice, Setting

COMMON = 2.0  # deviation of the planner's common error: of an unknown machine it may be anything
PLANNED, UNPLANNED = 0.25, 0.06  # of the error of one setting's value
OWN = 0.05  # of what no sum over settings explains
NEIGHBOUR = 0.5  # correlation of neighbouring values of an ordered setting


class Observation(Struct, frozen=True):
    """A trial as the surrogate reads it."""

    choice: Choice
    log_seconds: float
    variance: float  # of that


@dataclass(frozen=True)
class Belief:
    """Means and deviations of log(step seconds), a row a choice."""

    mean: Floats
    deviation: Floats

    def improvement(self, best: float) -> Floats:
        """Expected gain over ``best``, of log seconds."""
        gain = best - self.mean
        score = gain / self.deviation
        density = np.exp(-0.5 * score**2) / math.sqrt(2 * math.pi)
        below = np.array([0.5 * math.erfc(-each / math.sqrt(2)) for each in score.tolist()])
        improvement: Floats = gain * below + self.deviation * density
        return improvement


class Surrogate:
    """Trials of choices, and what follows of others."""

    def __init__(self, settings: Sequence[Setting], observations: Sequence[Observation]) -> None:
        self._settings = settings
        self._seen = [seen.choice for seen in observations]
        self._measured = np.array([seen.log_seconds for seen in observations])
        self._noise = np.array([seen.variance for seen in observations])

    def believe(
        self, choices: Sequence[Choice], predicted: Floats, predicted_seen: Floats
    ) -> Belief:
        """Belief in choices; log seconds are predicted of them and of those that were seen."""
        prior = self._own_variance()
        if not self._seen:
            return Belief(predicted, np.full(len(choices), math.sqrt(prior)))
        among = self._covariance(self._seen, self._seen) + np.diag(self._noise)
        across = self._covariance(choices, self._seen)
        weights = np.linalg.solve(among, across.T).T
        mean = predicted + weights @ (self._measured - predicted_seen)
        variance = prior - np.sum(weights * across, axis=1)
        return Belief(mean, np.sqrt(np.maximum(variance, 1e-8)))

    def _own_variance(self) -> float:
        errors = sum((PLANNED if s.planned else UNPLANNED) ** 2 for s in self._settings)
        return COMMON**2 + errors + OWN**2

    def _covariance(self, one: Sequence[Choice], other: Sequence[Choice]) -> Floats:
        total = np.full((len(one), len(other)), COMMON**2)
        same = np.ones((len(one), len(other)), dtype=bool)
        for number, setting in enumerate(self._settings):
            place = {value: index for index, value in enumerate(setting.values)}
            rows = np.array([place[choice[number]] for choice in one])
            columns = np.array([place[choice[number]] for choice in other])
            apart = np.abs(rows[:, None] - columns[None, :])
            alike = NEIGHBOUR**apart if setting.ordered else (apart == 0).astype(np.float64)
            total = total + (PLANNED if setting.planned else UNPLANNED) ** 2 * alike
            same &= apart == 0
        covariance: Floats = total + OWN**2 * same
        return covariance
