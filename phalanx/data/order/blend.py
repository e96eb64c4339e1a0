"""Blends: which source each sample comes from, so that weights hold over every prefix.

Weights become whole quotas of a cycle. Within the cycle the draws of each source are spread
evenly, so that after any number of samples each source is within a few of its share.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

LONGEST_CYCLE = 1 << 16  # samples; the smallest weight that can be kept is one in so many


def quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole shares of a cycle: exact where a cycle of at most 2^16 allows, else the nearest.

    A weight above zero gets at least one sample of the cycle.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    if total <= 0 or min(exact) < 0:  # an empty sum is 0
        raise ValueError(f"weights {tuple(weights)}: none may be negative, one must be positive")
    shares = [weight / total for weight in exact]
    length = math.lcm(*(share.denominator for share in shares))
    if length <= LONGEST_CYCLE:
        return tuple(int(share * length) for share in shares)
    ideal = [share * LONGEST_CYCLE for share in shares]
    rounded = [max(math.floor(share), 1 if share > 0 else 0) for share in ideal]
    while (missing := LONGEST_CYCLE - sum(rounded)) != 0:
        step = 1 if missing > 0 else -1
        candidates = [i for i, share in enumerate(ideal) if share > 0 and rounded[i] + step > 0]
        rounded[max(candidates, key=lambda i: (ideal[i] - rounded[i]) * step)] += step
    return tuple(rounded)


def arrange(shares: Sequence[int]) -> NDArray[np.int64]:
    """The source of each sample of a cycle that holds ``shares[s]`` samples of source ``s``.

    Sources are joined two by two, the rarest first; going back down, each join deals its
    samples evenly to its two sides. Being off by less than one at each join, of which only the
    last few weigh fully, keeps every prefix within a few samples.
    """
    joins: list[tuple[int, int, _Join | int]] = [
        (share, source, source) for source, share in enumerate(shares) if share
    ]
    heapq.heapify(joins)
    number = len(shares)
    while len(joins) > 1:
        (left_share, _, left), (right_share, _, right) = heapq.heappop(joins), heapq.heappop(joins)
        join = (left_share, left, right_share, right)
        heapq.heappush(joins, (left_share + right_share, number, join))
        number += 1
    cycle = np.empty(sum(shares), np.int64)
    waiting: list[tuple[_Join | int, NDArray[np.int64]]] = [(joins[0][2], np.arange(len(cycle)))]
    while waiting:
        node, slots = waiting.pop()
        if isinstance(node, int):
            cycle[slots] = node
            continue
        left_share, left, right_share, right = node
        total = left_share + right_share
        dealt = (np.arange(len(slots) + 1) * left_share + total // 2) // total
        to_left = dealt[1:] > dealt[:-1]
        waiting += [(left, slots[to_left]), (right, slots[~to_left])]
    return cycle


_Join = tuple[int, "_Join | int", int, "_Join | int"]


class Blend:
    """Draws from several sources by weight; sample n of the blend is found in O(1)."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.quotas = quotas(weights)
        self._quotas = np.array(self.quotas, np.int64)
        self._cycle = arrange(self.quotas)
        # How many samples of the same source precede each one within the cycle.
        self._before = np.empty_like(self._cycle)
        for source, quota in enumerate(self.quotas):
            self._before[self._cycle == source] = np.arange(quota)

    def locate(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source of each sample, and how many of that source come before it."""
        cycles, slots = np.divmod(numbers, len(self._cycle))
        sources = self._cycle[slots]
        return sources, cycles * self._quotas[sources] + self._before[slots]

    def counts(self, samples: int) -> NDArray[np.int64]:
        """How many of the first ``samples`` come from each source."""
        cycles, slot = divmod(samples, len(self._cycle))
        begun = np.bincount(self._cycle[:slot], minlength=len(self._quotas))
        return cycles * self._quotas + begun.astype(np.int64)
