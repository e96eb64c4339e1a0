"""Learning rate over the steps of a run, as a factor of the configured one."""

from __future__ import annotations

import math

from phalanx.config import Schedule


def learning_rate_factor(schedule: Schedule, step: int, steps: int) -> float:
    """Factor for step ``step`` (counted from zero) of ``steps``.

    The last step of the warmup has exactly the peak, or the first step where there is none, and
    the last step of the run has exactly ``final_fraction``.
    """
    made = step + 1  # steps done when this one is
    if made < schedule.warmup_steps:
        return made / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    peak = max(schedule.warmup_steps, 1)  # the last step with the full rate
    if schedule.kind == "wsd":
        peak = max(peak, steps - schedule.decay_steps)
    progress = min(max(made - peak, 0) / max(steps - peak, 1), 1.0)
    shape = (1 + math.cos(math.pi * progress)) / 2 if schedule.kind == "cosine" else 1 - progress
    return schedule.final_fraction + (1 - schedule.final_fraction) * shape
