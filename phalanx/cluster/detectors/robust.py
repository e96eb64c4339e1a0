"""Middle and spread that a few wild values do not move, in integers."""

from __future__ import annotations

import numpy as np

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

SPREAD_PPM = 1_482_600  # median deviation to standard deviation, of a normal distribution
MILLION = 1_000_000
MOST = 1e12  # of a loss or norm: differences of its millionths fit into 64 bits
MOST_PPM = 10**15


def middle(values: Ints, axis: int = 0) -> Ints:
    """The lower median along an axis: always one of the values."""
    rank = (values.shape[axis] - 1) // 2
    found: Ints = np.take(np.partition(values, rank, axis=axis), rank, axis=axis)
    return found


def scaled(value: float) -> int:
    """A measured number in millionths; one beyond all sense counts as the largest that fits."""
    return round(min(max(value, -MOST), MOST) * MILLION)


def middle_and_spread(values: Ints) -> tuple[int, int]:
    """Median of a row of values and its robust standard deviation (at least 1)."""
    center = int(middle(values))
    spread = int(middle(np.abs(values - center))) * SPREAD_PPM // MILLION
    return center, max(1, spread)
