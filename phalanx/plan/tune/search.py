"""Which settings to try next: best first, a race of the best under noise, a last comparison.

A machine without clock or processes: ``next`` says what to measure, ``add`` takes what came of it.
All that it decides follows from the trials that it was given, so a search that was killed goes on
with those of its journal.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from phalanx.plan.tune.comparison import Comparison, compare
from phalanx.plan.tune.settings import Choice, Setting, Value
from phalanx.plan.tune.surrogate import Belief, Observation, Surrogate
from phalanx.plan.tune.trials import (
    NextTrial,
    Phase,
    PredictedStep,
    Trial,
    TrialFailure,
    TuningBudget,
    TuningOutcome,
)

EXPLORED_SHARE = 0.6  # of the budget; the rest is for repeats
LEAST_GAIN = 0.002  # expected, of log seconds, that is worth a trial
FINALISTS, REPEATS = 3, 3
DECIDED = 1.64  # deviations behind the best that end a finalist's race
LEAST_PAIRS, MOST_PAIRS = 3, 6
MEMORY_SLACK = 1.15  # by which the planner may overrate what is held
USUAL_NOISE, USUAL_COUNT = 0.03, 4  # of a trial's log seconds before repeats, and its weight
SURPRISE = 0.12  # of log seconds: a choice that its kin promise so much more of runs again
DISTURBED = 0.25  # a trial that is so much slower than its choice's others: it was not alone
FAILED_PENALTY = 0.7  # of log seconds: what settings that fail are taken for, so that kin rank low


class SettingSearch:
    """Looks for the fastest choice. ``predict`` gives None of one that the rules refuse."""

    def __init__(
        self,
        settings: Sequence[Setting],
        original: Choice,
        predict: Callable[[Choice], PredictedStep | None],
        budget: TuningBudget,
    ) -> None:
        self.settings, self.original, self.budget = tuple(settings), original, budget
        self._predict, self._known = predict, dict[Choice, PredictedStep | None]()
        self.trials: list[Trial] = []
        self._seen: dict[Choice, list[Trial]] = {}
        self._chosen: Choice | None = None

    def add(self, trial: Trial) -> None:
        """What came of a trial."""
        choice = self.choice_of(trial)
        if trial.phase is Phase.COMPARE and choice != self.original:
            self._chosen = choice
        self.trials.append(trial)
        self._seen.setdefault(choice, []).append(trial)

    def choice_of(self, trial: Trial) -> Choice:
        """The choice that a trial measured."""
        return tuple(trial.values[setting.key] for setting in self.settings)

    def values_of(self, choice: Choice) -> dict[str, Value]:
        """The choice by the keys of its settings."""
        return {setting.key: value for setting, value in zip(self.settings, choice, strict=True)}

    def predicted(self, choice: Choice) -> PredictedStep | None:
        """What the planner says of it."""
        if choice not in self._known:
            self._known[choice] = self._predict(choice)
        return self._known[choice]

    @property
    def spent_seconds(self) -> float:
        """Of the budget."""
        return sum(trial.took_seconds for trial in self.trials)

    def usual_seconds(self, values: dict[str, Value]) -> float | None:
        """Of a step with these settings, over all their trials; None: none ran."""
        ran = [t.seconds for t in self.trials if t.values == values and not t.failure]
        return statistics.median(ran) if ran else None

    def next(self) -> NextTrial | None:
        """What to measure now; None: the search is over."""
        if not self.trials:
            return NextTrial(self.original, Phase.BASELINE)
        if self._compared:
            return self._next_of_pair()
        if (choice := self._explored()) is not None:
            return NextTrial(choice, Phase.EXPLORE)
        if (choice := self._raced()) is not None:
            return NextTrial(choice, Phase.RACE)
        return self._next_of_pair()

    def outcome(self) -> TuningOutcome:
        """What the trials so far come to: the original settings unless others are surely faster."""
        best = self._chosen or self.best()
        if best is None:
            return self._unchanged("no trial could run")
        if best == self.original:
            alone = len(self._seen) == 1 and len(self.settings) > 0
            told = "the budget was too small to try anything else" if alone else "nothing is faster"
            return self._unchanged(told)
        if not self._runs(self.original):
            values = self.values_of(best)
            reason = "the original settings cannot run"
            return TuningOutcome(values=values, changed=True, comparison=None, reason=reason)
        pairs = self._pairs()
        if self._failed(best):
            return self._unchanged("the chosen settings failed in the last comparison")
        if len(pairs) < LEAST_PAIRS:
            return self._unchanged("the budget ended before the last comparison did")
        found = compare(pairs, self._variance())
        if not found.faster:
            return self._unchanged("not faster beyond noise", found)
        values = self.values_of(best)
        reason = "faster beyond noise"
        return TuningOutcome(values=values, changed=True, comparison=found, reason=reason)

    def _unchanged(self, reason: str, found: Comparison | None = None) -> TuningOutcome:
        values = self.values_of(self.original)
        return TuningOutcome(values=values, changed=False, comparison=found, reason=reason)

    def best(self) -> Choice | None:
        """The choice that ran and is believed fastest."""
        ran = self._ran()
        if not ran:
            return None
        return ran[int(np.argmin(self._belief(ran).mean))]

    # Exploring

    def _explored(self) -> Choice | None:
        if len(self.trials) >= EXPLORED_SHARE * self.budget.trials:
            return None
        left = min(
            EXPLORED_SHARE * self.budget.seconds, self.budget.seconds - self._reserve_seconds()
        )
        if self.spent_seconds + self._usual_cost() > left:
            return None
        best = self.best() or self.original
        if (again := self._doubted(best)) is not None:
            return again
        pool = self.candidates(best)
        if not pool:
            return None
        belief = self._belief(pool)
        ran = self._ran()
        bar = float(np.min(self._belief(ran).mean)) if ran else float(np.max(belief.mean))
        gains = belief.improvement(bar)
        first = int(np.argmax(gains))
        return pool[first] if gains[first] >= LEAST_GAIN or not ran else None

    def _doubted(self, best: Choice) -> Choice | None:
        """A choice that would be the best if it were as fast as others say, and was measured once.

        Something may have disturbed its trial.
        """
        every = self._observations()
        (bar,) = self._belief([best], every).mean
        for choice, trials in self._seen.items():
            if len(trials) > 1 or trials[0].failure or choice in (best, self.original):
                continue
            (kin,) = self._belief([choice], [one for one in every if one.choice != choice]).mean
            if kin < bar and math.log(trials[0].seconds) - kin > SURPRISE:
                return choice
        return None

    def candidates(self, around: Choice) -> list[Choice]:
        """Choices that were not tried: all of what is planned, and one other setting changed."""
        ranges = [
            setting.values if setting.planned else (value,)
            for setting, value in zip(self.settings, around, strict=True)
        ]
        every = dict.fromkeys(itertools.product(*ranges))
        for number, setting in enumerate(self.settings):
            if not setting.planned:
                for value in setting.values:
                    every[(*around[:number], value, *around[number + 1 :])] = None
        least_failed = self._least_failed_bytes()
        return [
            each for each in every if each not in self._seen and self._may_fit(each, least_failed)
        ]

    def _may_fit(self, choice: Choice, least_failed: float) -> bool:
        found = self.predicted(choice)
        if found is None:
            return False
        if found.limit_bytes and found.held_bytes > MEMORY_SLACK * found.limit_bytes:
            return False
        return not found.held_bytes or found.held_bytes < least_failed

    def _least_failed_bytes(self) -> float:
        """What is predicted to hold as much as a choice that did not fit does not fit either."""
        held = [
            found.held_bytes
            for choice, trials in self._seen.items()
            if any(trial.failure is TrialFailure.MEMORY for trial in trials)
            and (found := self.predicted(choice)) is not None
            and found.held_bytes
        ]
        return min(held, default=math.inf)

    # The race of the best

    def _raced(self) -> Choice | None:
        """The finalist that was measured least, while there is more than one."""
        limit = self.budget.trials - 2 * LEAST_PAIRS
        left = self.budget.seconds - self._reserve_seconds()
        if len(self.trials) >= limit or self.spent_seconds + self._usual_cost() > left:
            return None
        ran = self._ran()
        if not ran:
            return None
        favourite = min(ran, key=self._log_predicted)
        if len(self._seen[favourite]) == 1 and favourite != self.original:
            return favourite  # nothing is left out for one bad measurement
        belief = self._belief(ran)
        order = np.argsort(belief.mean, kind="stable")[:FINALISTS].tolist()
        first = order[0]
        close = [
            at
            for at in order
            if belief.mean[at] - belief.mean[first]
            <= DECIDED * math.hypot(belief.deviation[at], belief.deviation[first])
        ]
        counted = [(len(self._seen[ran[at]]), at) for at in close if ran[at] != self.original]
        if not counted or (len(close) == 1 and self._runs(self.original)):
            return None  # whether it beats the original is the comparison's to say
        count, at = min(counted)
        return ran[at] if count < REPEATS else None

    # The last comparison

    @property
    def _compared(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.phase is Phase.COMPARE]

    def _next_of_pair(self) -> NextTrial | None:
        chosen = self._chosen or self.best()
        if chosen is None or chosen == self.original or not self._runs(self.original):
            return None
        done = len(self._compared)
        if done and self._failed(chosen):
            return None
        if done % 2 == 0 and not self._wants_pair(chosen):
            return None
        # One way round, then the other: what changes slowly falls on both alike.
        first = (done % 4) in (0, 3)
        return NextTrial(self.original if first else chosen, Phase.COMPARE)

    def _wants_pair(self, chosen: Choice) -> bool:
        pairs = self._pairs()
        cost = self._cost(self.original) + self._cost(chosen)
        if len(self.trials) + 2 > self.budget.trials:
            return False
        if self.spent_seconds + cost > self.budget.seconds:
            return False
        if len(pairs) < LEAST_PAIRS:
            return len(self._compared) < 2 * MOST_PAIRS
        found = compare(pairs, self._variance())
        return len(pairs) < MOST_PAIRS and not (found.faster or found.slower)

    def _pairs(self) -> list[tuple[float, float]]:
        """Step seconds before and after, of pairs in which both ran."""
        trials = self._compared
        pairs = []
        for one, other in zip(trials[::2], trials[1::2], strict=False):
            if not (one.failure or other.failure):
                before, after = (
                    (one, other) if self.choice_of(one) == self.original else (other, one)
                )
                pairs.append((before.seconds, after.seconds))
        return pairs

    # What trials say

    def _runs(self, choice: Choice) -> bool:
        return any(not trial.failure for trial in self._seen.get(choice, ()))

    def _failed(self, choice: Choice) -> bool:
        return any(trial.failure for trial in self._seen.get(choice, ()))

    def _ran(self) -> list[Choice]:
        return [c for c, trials in self._seen.items() if not any(t.failure for t in trials)]

    def _cost(self, choice: Choice) -> float:
        taken = [trial.took_seconds for trial in self._seen.get(choice, ())]
        return statistics.median(taken) if taken else self._usual_cost()

    def _usual_cost(self) -> float:
        return statistics.median(trial.took_seconds for trial in self.trials)

    def _reserve_seconds(self) -> float:
        """For the last comparison."""
        if not self._runs(self.original):
            return 0.0
        pair = self._cost(self.original) + self._cost(self.best() or self.original)
        return min(LEAST_PAIRS * pair, (1 - EXPLORED_SHARE) * self.budget.seconds)

    def _belief(
        self, choices: Sequence[Choice], seen: Sequence[Observation] | None = None
    ) -> Belief:
        seen = self._observations() if seen is None else seen
        surrogate = Surrogate(self.settings, seen)
        return surrogate.believe(
            choices,
            np.array([self._log_predicted(choice) for choice in choices]),
            np.array([self._log_predicted(one.choice) for one in seen]),
        )

    def _log_predicted(self, choice: Choice) -> float:
        found = self.predicted(choice)
        return math.log(found.seconds) if found is not None and found.seconds else 0.0

    def _observations(self) -> list[Observation]:
        undisturbed = {choice: _undisturbed(trials) for choice, trials in self._seen.items()}
        variance = self._variance()
        seen = [
            Observation(choice, each, variance)
            for choice, logs in undisturbed.items()
            for each in logs
        ]
        worst = max((one.log_seconds for one in seen), default=0.0) + FAILED_PENALTY
        failed = [
            Observation(choice, worst, variance)
            for choice, trials in self._seen.items()
            for trial in trials
            if trial.failure is TrialFailure.OTHER
        ]
        return seen + failed

    def _variance(self) -> float:
        """Of log seconds from trial to trial of one choice, as repeats show it."""
        squares, freedom = USUAL_COUNT * USUAL_NOISE**2, USUAL_COUNT
        for trials in self._seen.values():
            logs = _undisturbed(trials)
            if len(logs) > 1:
                squares += (len(logs) - 1) * statistics.variance(logs)
                freedom += len(logs) - 1
        return squares / freedom


def _undisturbed(trials: Sequence[Trial]) -> list[float]:
    """Log seconds of a choice's trials; whatever disturbs one only ever adds time."""
    logs = [math.log(trial.seconds) for trial in trials if not trial.failure]
    usual = statistics.median_low(logs) if logs else 0.0
    return [each for each in logs if each - usual <= DISTURBED]
