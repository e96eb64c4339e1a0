"""Learning rate over the steps of a run, as a factor of the configured one."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from phalanx.config import Job, Schedule, ScheduleExtension, schedule_span


def learning_rate_factor(schedule: Schedule, step: int, steps: int) -> float:
    """Factor for step ``step`` (counted from zero) of ``steps``.

    The last step of the warmup has exactly the peak, or the first step where there is none, and
    the last step of the run has exactly ``final_fraction``.
    """
    begun = [each for each in schedule.extensions if each.at_step <= step]
    if not begun:
        return _along(schedule, step, schedule_span(schedule, steps))
    own, later = begun[-1], schedule.extensions[len(begun) :]
    made = step + 1 - own.at_step
    if made < own.warmup_steps:
        before = learning_rate_factor(schedule, own.at_step - 1, steps)
        return before + (own.peak_fraction - before) * made / own.warmup_steps
    span = (later[0].at_step if later else steps) - own.at_step
    return own.peak_fraction * _along(own, step - own.at_step, span)


def _along(curve: Schedule | ScheduleExtension, step: int, steps: int) -> float:
    """Share of a curve's peak at a step (counted from zero) of those that it spans."""
    made = step + 1  # steps done when this one is
    if made < curve.warmup_steps:
        return made / curve.warmup_steps
    if curve.kind == "constant":
        return 1.0
    peak = max(curve.warmup_steps, 1)  # the last step with the full rate
    if curve.kind == "wsd":
        peak = max(peak, steps - curve.decay_steps)
    shape = curve.decay_shape if curve.kind == "wsd" else curve.kind
    progress = min(max(made - peak, 0) / max(steps - peak, 1), 1.0)
    return curve.final_fraction + (1 - curve.final_fraction) * _left(shape, progress)


def _left(shape: str, progress: float) -> float:
    """What is left of a decay that has come so far."""
    if shape == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    return 1 - math.sqrt(progress) if shape == "sqrt" else 1 - progress


def rewritten_rate(job: Job, config: dict[str, Any], made: int) -> str:
    """A sentence where a job's curve is not the one that a run followed so far; "": it is.

    ``config``: of the run's checkpoint after ``made`` steps.
    """
    try:
        before = msgspec.convert(config.get("schedule", {}), Schedule)
    except msgspec.ValidationError:
        return ""  # of another version
    spanned = config.get("train", {}).get("steps", job.train.steps)
    if not made:
        return ""
    last = learning_rate_factor(before, made - 1, spanned)
    now = learning_rate_factor(job.schedule, made - 1, job.train.steps)
    if last == now:
        return ""
    following = learning_rate_factor(job.schedule, made, job.train.steps)
    jump = (
        f"the learning rate goes on from {last:.4g} to {following:.4g} of its peak: the schedule "
        f"spanned {schedule_span(before, spanned)} steps, and is another one now. To keep it, "
    )
    curves = before.extensions or job.schedule.extensions
    if before.kind == job.schedule.kind == "constant" and not curves:
        return jump + f"set schedule.warmup_steps = {before.warmup_steps}"
    return (
        f"{jump}set schedule.steps = {schedule_span(before, spanned)}; to grow the rate anew, add "
        f"[[schedule.extensions]] with at_step = {made}"
    )
