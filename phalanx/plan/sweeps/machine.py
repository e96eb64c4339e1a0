"""The sweep's state machine: asynchronous successive halving (ASHA), or each trial once.

A machine without clock or network: it is told what began and what ended, ``next_start`` says what
to begin. What it says follows from the set of these facts and not from their order, so whoever
drives it may be killed at any time: the next one tells it of the jobs that there are, and goes on.

A rung is a number of steps that trials are compared at. Of those that have come so far, one in
``reduction`` goes on, the best first and as soon as there is room, without waiting for the others;
when all have come, the number is rounded up, so that the best one always goes on. Thus each rung
has a known size, and a sweep a known cost.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from typing import Literal

from msgspec import Struct


class RungStart(Struct, frozen=True):
    """An order to train a trial up to a rung, from scratch or from the rung before."""

    trial: int
    rung: int


class RungShape(Struct, frozen=True, kw_only=True):
    """The rungs of a sweep: steps, and how many trials come to each at most."""

    steps: tuple[int, ...]
    trials: tuple[int, ...]

    @property
    def total_steps(self) -> int:
        """Steps of all trials together; a promoted trial keeps its earlier steps."""
        before = (0, *self.steps)
        return sum(
            count * (steps - least)
            for count, steps, least in zip(self.trials, self.steps, before, strict=False)
        )


def rung_shape(trials: int, first_steps: int, last_steps: int, reduction: int) -> RungShape:
    """Rungs up to the last, each ``reduction`` times the one before, none below the first."""
    steps = [last_steps]
    while steps[0] // reduction >= max(1, first_steps):
        steps.insert(0, steps[0] // reduction)
    counts = [trials]
    for _ in steps[1:]:
        counts.append(math.ceil(counts[-1] / reduction))
    return RungShape(steps=tuple(steps), trials=tuple(counts))


class SweepRung:
    """Results of the trials at one rung."""

    def __init__(self) -> None:
        self.live: dict[int, None] = {}
        self.values: dict[int, float | None] = {}  # of those that ended; None: it failed
        self.went_on = 0
        self._best: list[tuple[float, int]] = []  # a heap of those that may go on

    def has(self, trial: int) -> bool:
        """Whether a trial has started this rung."""
        return trial in self.live or trial in self.values

    def add(self, trial: int, value: float | None, key: float) -> None:
        """Add the result of a trial; the smallest key is the best."""
        self.live.pop(trial, None)
        self.values[trial] = value
        if value is not None:
            heappush(self._best, (key, trial))

    def best(self, above: SweepRung) -> int | None:
        """The best trial that has not started the rung above, if any."""
        while self._best and above.has(self._best[0][1]):
            heappop(self._best)
        return self._best[0][1] if self._best else None


class SweepMachine:
    """The state of one sweep."""

    def __init__(
        self,
        trials: int,
        rungs: int = 1,
        reduction: int = 3,
        at_once: int = 1,
        better: Literal["lower", "higher"] = "lower",
    ) -> None:
        self.trials, self.reduction, self.at_once = trials, reduction, at_once
        self.rungs = [SweepRung() for _ in range(rungs)]
        self._sign = 1.0 if better == "lower" else -1.0
        self._next = 0  # trials below it have begun

    # What happens.

    def began(self, trial: int, rung: int) -> None:
        """Record that a job of this trial is waiting or running."""
        if not self.rungs[rung].has(trial):
            self.rungs[rung].live[trial] = None
            if rung:
                self.rungs[rung - 1].went_on += 1

    def ended(self, trial: int, rung: int, value: float | None) -> None:
        """Record a trial's value at its rung; None: it failed and is never retried."""
        self.began(trial, rung)
        if trial not in self.rungs[rung].live:
            return  # it was told before
        finite = value is not None and math.isfinite(value)
        self.rungs[rung].add(trial, value if finite else None, self._sign * (value or 0.0))

    def withdrawn(self, trial: int, rung: int) -> None:
        """Undo the start of a trial whose job was cancelled."""
        if trial in self.rungs[rung].live:
            del self.rungs[rung].live[trial]
            if rung:
                self.rungs[rung - 1].went_on -= 1
                before = self.rungs[rung - 1].values[trial]
                assert before is not None
                self.rungs[rung - 1].add(trial, before, self._sign * before)
            else:
                self._next = min(self._next, trial)

    # What follows.

    @property
    def live(self) -> int:
        """Number of trials that wait or run."""
        return sum(len(rung.live) for rung in self.rungs)

    def next_start(self) -> RungStart | None:
        """What to start now; None if the limit is reached or a result is needed first."""
        return self._next_start() if self.live < self.at_once else None

    @property
    def done(self) -> bool:
        """Whether nothing runs and nothing is left to start."""
        return not self.live and self._next_start() is None

    def _next_start(self) -> RungStart | None:
        """Promotions come first, those to the highest rung before all others."""
        for number in range(len(self.rungs) - 2, -1, -1):
            rung, above = self.rungs[number], self.rungs[number + 1]
            if rung.went_on < self._may_go_on(number):
                trial = rung.best(above)
                if trial is not None:
                    return RungStart(trial, number + 1)
        first = self.rungs[0]
        while self._next < self.trials and first.has(self._next):
            self._next += 1
        return RungStart(self._next, 0) if self._next < self.trials else None

    def _may_go_on(self, number: int) -> int:
        """Number of promotions allowed from a rung so far."""
        come = len(self.rungs[number].values)
        if self._complete(number):
            return math.ceil(come / self.reduction)
        return come // self.reduction

    def _complete(self, number: int) -> bool:
        """Whether no further trial can reach a rung."""
        rung = self.rungs[number]
        if rung.live:
            return False
        if number == 0:
            return len(rung.values) == self.trials
        below = self.rungs[number - 1]
        if not self._complete(number - 1):
            return False
        return below.went_on >= self._may_go_on(number - 1) or below.best(rung) is None
