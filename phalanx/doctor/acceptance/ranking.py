"""Who of several alike is slow: by a rule that the slow ones themselves do not move."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median_high

from msgspec import Struct

LEAST_RANKED = 3  # of fewer nobody can say which one is off
LEAST_LACK_PPM = 50_000  # less is the weather
DEVIATIONS = 5  # robust ones, that a slow one is away from the middle
# Where all but one are the same to the bit, chance still moves them by so much.
LEAST_SPREAD_PPM = 5_000
MOST_TIMES = 1_000.0  # the middle: what is more is as much


class Ranked(Struct, frozen=True):
    """One of several, and how it compares."""

    name: str
    rate: float
    share: float  # of the middle
    slow: bool


def rank(rates: Mapping[str, float]) -> list[Ranked]:
    """All of them, the slowest first; fewer than three are listed and nobody is called slow."""
    import numpy as np

    # Imported here: whoever only shows what was ranked starts without numpy.
    from phalanx.cluster.detectors.robust import MILLION, middle_and_spread

    if not rates:
        return []
    # Over the middle, not over the fastest: whoever claims an absurd rate would hide all others.
    usual = median_high(rates.values())
    if usual <= 0:
        return [Ranked(name, rate, 0.0, False) for name, rate in sorted(rates.items())]
    parts = {name: int(min(rate / usual, MOST_TIMES) * MILLION) for name, rate in rates.items()}
    center, spread = middle_and_spread(np.array(list(parts.values()), np.int64))
    lack = max(
        center * LEAST_LACK_PPM // MILLION,
        DEVIATIONS * max(spread, center * LEAST_SPREAD_PPM // MILLION),
    )
    enough = len(rates) >= LEAST_RANKED
    ranked = [
        Ranked(name, rates[name], part / max(1, center), enough and part < center - lack)
        for name, part in parts.items()
    ]
    return sorted(ranked, key=lambda each: (each.rate, each.name))


def stragglers(rates: Mapping[str, float]) -> list[Ranked]:
    """Those that are slow."""
    return [each for each in rank(rates) if each.slow]
