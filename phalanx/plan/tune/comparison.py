"""Two settings compared by trials that took turns: how much faster, and how sure that is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from msgspec import Struct

# One-sided 99 % quantiles of Student's t, from three degrees of freedom on. Of the normal: 2.33.
T99 = (4.541, 3.747, 3.365, 3.143, 2.998, 2.896, 2.821, 2.764)
USUAL_PAIRS = 3  # what is known of the noise counts as so many: few pairs may agree by luck


class Comparison(Struct, frozen=True, kw_only=True):
    """How many times faster the second of pairs was, with a 98 % interval."""

    pairs: int
    speedup: float
    low: float
    high: float

    @property
    def faster(self) -> bool:
        """Beyond noise."""
        return self.low > 1

    @property
    def slower(self) -> bool:
        """Beyond noise."""
        return self.high < 1


def compare(pairs: Sequence[tuple[float, float]], variance: float) -> Comparison:
    """Step seconds of two settings, one pair after the other.

    ``variance`` of one trial's log seconds is what repeats showed before.
    """
    ratios = [math.log(before / after) for before, after in pairs]
    count = len(ratios)
    mean = statistics.fmean(ratios)
    squares = USUAL_PAIRS * 2 * variance + sum((ratio - mean) ** 2 for ratio in ratios)
    freedom = USUAL_PAIRS + count - 1
    deviation = math.sqrt(squares / freedom)
    wide = T99[min(freedom - 3, len(T99) - 1)] * deviation / math.sqrt(count)
    low, middle, high = (math.exp(mean + side) for side in (-wide, 0.0, wide))
    return Comparison(pairs=count, speedup=middle, low=low, high=high)
