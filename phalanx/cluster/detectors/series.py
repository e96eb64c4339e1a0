"""Series of a whole gang: steps that became slower, waits for data, a loss that jumps."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import numpy as np

from phalanx.cluster.detectors.robust import MILLION, MOST_PPM, middle_and_spread, scaled

RECENT, BEFORE = 20, 60  # steps that are compared
LEAST_REGRESSION_PPM = 50_000
LEAST_DEVIATIONS = 6
STARVED_PPM = 100_000
SPIKE_DEVIATIONS = 12
LEAST_SPIKE_PPM = 200_000  # of the usual loss
SPIKE_WINDOW = 32


def regression(step_ns: Sequence[int]) -> int | None:
    """How much slower (in parts per million) the last steps are than those before them."""
    if len(step_ns) < RECENT + BEFORE:
        return None
    values = np.asarray(step_ns[-RECENT - BEFORE :], np.int64)
    center, spread = middle_and_spread(values[:BEFORE])
    now, _ = middle_and_spread(values[BEFORE:])
    slower = now - center
    if slower * MILLION <= LEAST_REGRESSION_PPM * center or slower <= LEAST_DEVIATIONS * spread:
        return None
    return slower * MILLION // center


def starved(data_wait_ns: int, passed_ns: int) -> int | None:
    """The share of the time that is spent waiting for data, when that is too much."""
    share = data_wait_ns * MILLION // max(1, passed_ns)
    return share if share >= STARVED_PPM else None


def loss_spike(losses: Sequence[float | None]) -> int | None:
    """How far (parts per million of the usual loss) the last loss is above; None: it is not.

    A loss that is no finite number (or None) is a spike by itself.
    """
    if not losses:
        return None
    last = losses[-1]
    if last is None or not isfinite(last):
        return MILLION
    before = losses[-SPIKE_WINDOW - 1 : -1]
    finite = [scaled(loss) for loss in before if loss is not None and isfinite(loss)]
    if len(finite) < SPIKE_WINDOW // 2:
        return None
    center, spread = middle_and_spread(np.asarray(finite, np.int64))
    above = scaled(last) - center
    limit = max(SPIKE_DEVIATIONS * spread, LEAST_SPIKE_PPM * abs(center) // MILLION)
    return min(MOST_PPM, above * MILLION // max(1, abs(center))) if above > limit else None
