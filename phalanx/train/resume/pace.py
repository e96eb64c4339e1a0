"""How many steps lie between snapshots in memory: each, or fewer where they would cost too much.

A snapshot is copied behind the next step's forward and backward. What does not fit there holds the
update up, and only fewer snapshots help. Fewer mean more steps to repeat after a failure: that
number is bounded by the job, and said whenever it changes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

from phalanx.config import Job

FIRST_STEPS = 8  # of a start, before the first decision
LONGEST_STEPS = 512  # between two decisions; the time between them doubles
WARM_STEPS = 2  # that compile, allocate and connect


class PaceMeasure(NamedTuple):
    """What a decision follows from, in seconds."""

    cost: float  # that a snapshot took from training
    step: float  # without snapshots


class Pace(NamedTuple):
    """A decision."""

    every: int  # steps
    share: float  # of the training time that snapshots take then
    bounded: bool  # more would be needed to stay within the job's share


def decide(measure: PaceMeasure, share: float, most: int, now: int) -> Pace:
    """The fewest steps between snapshots that keep their cost within a share of the step time.

    It stays as it is while half of it would not do: what is measured varies.
    """
    wanted = max(1, math.ceil(measure.cost / (share * measure.step) - 1e-9))
    every = now if wanted <= now < 2 * wanted else wanted
    return Pace(min(every, most), measure.cost / measure.step / min(every, most), wanted > most)


class SnapshotPace:
    """Of one start; all ranks decide alike, from the largest of what they measured."""

    def __init__(self, job: Job, first_step: int, largest: Callable[[list[float]], list[float]]):
        self.every = 1
        self._share, self._most = job.checkpoint.memory_share, job.checkpoint.memory_at_most
        self._largest = largest
        self._warm_until = first_step + WARM_STEPS
        self._apart = FIRST_STEPS
        self._renews_at = first_step + FIRST_STEPS
        self._costs: list[float] = []
        self._steps: list[float] = []

    def stepped(self, step: int, seconds: float, cost: float) -> None:
        """A step took so long, and what a snapshot took from training is known; 0: none was."""
        if step < self._warm_until:
            return
        self._steps.append(seconds - cost)  # it may be told a step late: the median is meant
        if cost:
            self._costs.append(cost)

    def renews(self, step: int) -> bool:
        """Whether ``renew`` is to be called, by all ranks."""
        return step >= self._renews_at

    def renew(self, step: int) -> str:
        """Decide anew; returns what changed, in words. Collective."""
        self._apart = min(2 * self._apart, LONGEST_STEPS)
        self._renews_at = step + self._apart
        cost = statistics.median(self._costs or [0.0])
        alone = statistics.median(self._steps or [0.0])
        self._costs, self._steps = [], []
        cost, alone = self._largest([cost, alone])
        if alone <= 0:
            return ""
        before = self.every
        pace = decide(PaceMeasure(cost, alone), self._share, self._most, before)
        self.every = pace.every
        if pace.every == before and not pace.bounded:
            return ""
        text = (
            f"every {_steps(pace.every)} from here on, {_steps(before)} before: one takes "
            f"{cost:.3f} s from a step of {alone:.3f} s, together {pace.share:.1%}; "
            f"a failure costs up to {_steps(pace.every)}"
        )
        if pace.bounded:
            text += f" (checkpoint.memory_at_most; {self._share:.1%} would need more)"
        return text


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
