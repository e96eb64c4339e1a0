"""Learning rate over the steps of a run, as a factor of the configured one."""

from __future__ import annotations

import math

from phalanx.config import Schedule


def learning_rate_factor(schedule: Schedule, step: int, steps: int) -> float:
    """Factor for step ``step`` (counted from zero) of ``steps``."""
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    first = schedule.warmup_steps
    if schedule.kind == "wsd":
        first = max(first, steps - schedule.decay_steps)
    progress = min(max(step - first, 0) / max(steps - first, 1), 1.0)
    shape = (1 + math.cos(math.pi * progress)) / 2 if schedule.kind == "cosine" else 1 - progress
    return schedule.final_fraction + (1 - schedule.final_fraction) * shape
