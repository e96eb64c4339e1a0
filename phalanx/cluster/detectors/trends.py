"""Slow changes of a gang: memory that creeps up, gradients that grow, saves that take longer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from phalanx.cluster.detectors.robust import MILLION, MOST_PPM, middle_and_spread, scaled

CREEP_SAMPLES = 24
LEAST_CREEP_PPM = 50_000  # of the memory in use
EXPLOSION_WINDOW = 32
EXPLOSION_PPM = 9_000_000  # above the usual norm
SLOW_SAVES = 3  # in a row
SLOW_SAVE_PPM = 1_000_000  # above the usual time
BELOW_PLAN_PPM = 150_000
PLAN_STEPS = 24


def memory_creep(peaks: Sequence[int]) -> int | None:
    """How much (parts per million) memory has grown, if it grew all the way."""
    if len(peaks) < CREEP_SAMPLES:
        return None
    parts = np.array_split(np.asarray(peaks[-CREEP_SAMPLES:], np.int64), 4)
    middles = [middle_and_spread(part)[0] for part in parts]
    grew = all(later > earlier for earlier, later in pairwise(middles))
    growth = (middles[-1] - middles[0]) * MILLION // max(1, middles[0])
    return growth if grew and growth >= LEAST_CREEP_PPM else None


def gradient_explosion(norms: Sequence[float | None]) -> int | None:
    """How far (parts per million of the usual norm) the last gradient norm is above it."""
    if not norms or norms[-1] is None:
        return None
    usual = [scaled(norm) for norm in norms[-EXPLOSION_WINDOW - 1 : -1] if norm is not None]
    if len(usual) < EXPLOSION_WINDOW // 2:
        return None
    center, _ = middle_and_spread(np.asarray(usual, np.int64))
    above = (scaled(norms[-1]) - center) * MILLION // max(1, center)
    return min(MOST_PPM, above) if above > EXPLOSION_PPM else None


def slow_saves(seconds: Sequence[float]) -> int | None:
    """How much longer (parts per million) the last saves held up training than those before."""
    if len(seconds) < 2 * SLOW_SAVES:
        return None
    values = [scaled(each) for each in seconds]
    center, _ = middle_and_spread(np.asarray(values[:-SLOW_SAVES], np.int64))
    slower = [(value - center) * MILLION // max(1, center) for value in values[-SLOW_SAVES:]]
    return min(slower) if min(slower) > SLOW_SAVE_PPM else None


def below_plan(step_ns: Sequence[int], planned_ns: int) -> int | None:
    """How much longer (parts per million) steps take than was planned."""
    if not planned_ns or len(step_ns) < PLAN_STEPS:
        return None
    center, _ = middle_and_spread(np.asarray(step_ns[-PLAN_STEPS:], np.int64))
    slower = (center - planned_ns) * MILLION // planned_ns
    return slower if slower > BELOW_PLAN_PPM else None
