"""A machine that is played: true step times that nobody knows, noise, drift, outliers, memory."""

from __future__ import annotations

import itertools
import math
import random

from phalanx.plan.tune.search import SettingSearch
from phalanx.plan.tune.settings import Choice, Setting
from phalanx.plan.tune.trials import Phase, PredictedStep, Trial, TrialFailure, TuningBudget

SETTINGS = (
    Setting(key="train.micro_batch", values=(1, 2, 4, 8, 16), planned=True),
    Setting(key="memory.recompute", values=("none", "selective", "full"), planned=True),
    Setting(key="train.compile", values=("auto", "off"), planned=True),
    Setting(key="parallel.prefetch_layers", values=(0, 1, 2, 4)),
    Setting(key="data.prefetch", values=(0, 1, 4, 16)),
    Setting(key="backend.environment.NCCL_ALGO", values=("", "Ring", "Tree", "NVLS")),
    Setting(key="backend.environment.NCCL_PROTO", values=("", "Simple", "LL128", "LL")),
)
WORST: Choice = (1, "full", "off", 1, 4, "", "")
LIMIT = 100.0


class PlayedMachine:
    """Step times with hidden effects of every value, and of every choice."""

    def __init__(self, seed: int, noise: float = 0.03, outliers: float = 0.03) -> None:
        self.seed, self.noise, self.outliers = seed, noise, outliers
        self.random = random.Random(seed)
        self.speed = math.exp(self.random.gauss(0, 0.5))  # by which the planner is wrong as a whole
        self.hunger = self.random.uniform(0.9, 1.15)  # bytes held over bytes predicted
        self.effects = {
            (setting.key, value): self.random.gauss(0, 0.1 if setting.planned else 0.03)
            for setting in SETTINGS
            for value in setting.values
        }
        self.broken = self.random.choice(("NVLS", "none such"))
        self.clock = 0

    def predict(self, choice: Choice) -> PredictedStep | None:
        """The planner's word: few micro-batches start fewer kernels, recompute costs a forward."""
        batch, recompute, compiled = int(choice[0]), choice[1], choice[2]
        seconds = (1 + 0.6 / batch) * {"none": 1.0, "selective": 1.1, "full": 1.33}[str(recompute)]
        held = 20 + batch * {"none": 12.0, "selective": 7.0, "full": 1.5}[str(recompute)]
        return PredictedStep(seconds * (1.3 if compiled == "off" else 1.0), held, LIMIT)

    def fits(self, choice: Choice) -> bool:
        found = self.predict(choice)
        assert found is not None
        return found.held_bytes * self.hunger <= LIMIT

    def true_seconds(self, choice: Choice) -> float:
        """Of a step, without noise."""
        found = self.predict(choice)
        assert found is not None
        shifts = (
            self.effects[setting.key, value]
            for setting, value in zip(SETTINGS, choice, strict=True)
        )
        own = random.Random(f"{self.seed} {choice}").gauss(0, 0.02)
        return found.seconds * self.speed * math.exp(sum(shifts) + own)

    def best_seconds(self) -> float:
        """Of all choices that run."""
        every = itertools.product(*(setting.values for setting in SETTINGS))
        return min(self.true_seconds(c) for c in every if self.fits(c) and self.broken not in c)

    def trial(self, search: SettingSearch, choice: Choice, phase: Phase, steps: int = 8) -> Trial:
        """What a trial of it would report."""
        self.clock += 1
        shared = {
            "number": len(search.trials),
            "phase": phase,
            "values": search.values_of(choice),
            "took_seconds": 10.0,
        }
        if not self.fits(choice):
            return Trial(**shared, failure=TrialFailure.MEMORY, reason="out of memory")
        if self.broken in choice:
            return Trial(**shared, failure=TrialFailure.OTHER, reason="NCCL error")
        drift = 0.04 * math.sin(self.clock / 7 + self.seed)
        shift = drift + self.random.gauss(0, self.noise)
        if self.random.random() < self.outliers:
            shift += 0.4
        usual = self.true_seconds(choice) * math.exp(shift)
        taken = tuple(usual * math.exp(self.random.gauss(0, self.noise)) for _ in range(steps))
        return Trial(**shared, step_seconds=taken)


def searched(
    machine: PlayedMachine, original: Choice = WORST, budget: TuningBudget | None = None
) -> SettingSearch:
    """A search on a played machine, to its end."""
    search = SettingSearch(SETTINGS, original, machine.predict, budget or TuningBudget())
    while (asked := search.next()) is not None:
        search.add(machine.trial(search, asked.choice, asked.phase))
    return search
