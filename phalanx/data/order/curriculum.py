"""Which source each sample of a run comes from: blends that follow one another."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from phalanx.config import Data
from phalanx.data.order.blend import Blend

Numbers: TypeAlias = NDArray[np.int64]


class Curriculum:
    """Blends, each from a sample number on; draws of a source go on where the last one ended."""

    def __init__(self, firsts: Sequence[int], blends: Sequence[Blend], sources: int) -> None:
        self.firsts = list(firsts)
        self.blends = list(blends)
        # Draws of each source before each stage.
        self._drawn = [np.zeros(sources, np.int64)]
        for first, past, blend in zip(firsts, firsts[1:], blends, strict=False):
            self._drawn.append(self._drawn[-1] + blend.counts(past - first))

    def locate(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Source of each sample, and how many draws of that source come before it."""
        stages = np.searchsorted(self.firsts, numbers, side="right") - 1
        if (stages == stages[0]).all():
            return self._locate_in(int(stages[0]), numbers)
        sources, ordinals = np.empty_like(numbers), np.empty_like(numbers)
        for stage in np.unique(stages).tolist():
            chosen = stages == stage
            sources[chosen], ordinals[chosen] = self._locate_in(stage, numbers[chosen])
        return sources, ordinals

    def counts(self, samples: int) -> Numbers:
        """How many of the run's first ``samples`` come from each source."""
        stage = self.stage_of(samples)
        begun: Numbers = self.blends[stage].counts(samples - self.firsts[stage])
        return self._drawn[stage] + begun

    def stage_of(self, number: int) -> int:
        """The stage that holds at a sample number."""
        return bisect_right(self.firsts, number) - 1

    def _locate_in(self, stage: int, numbers: Numbers) -> tuple[Numbers, Numbers]:
        sources, ordinals = self.blends[stage].locate(numbers - self.firsts[stage])
        return sources, ordinals + self._drawn[stage][sources]


def curriculum(data: Data) -> Curriculum:
    """The curriculum that the settings describe; one source alone is a blend of one.

    A stage begins with the first sample that lies wholly behind its token count.
    """
    if not data.blend:
        return Curriculum([0], [Blend([1.0])], 1)
    firsts, blends = [0], [Blend([source.weight for source in data.blend.values()])]
    for stage in data.stages:
        first = -(-stage.tokens // data.sequence)
        blend = Blend([stage.weights.get(name, 0.0) for name in data.blend])
        if first == firsts[-1]:  # within the sample that another stage begins with
            blends[-1] = blend
        else:
            firsts.append(first)
            blends.append(blend)
    return Curriculum(firsts, blends, len(data.blend))
