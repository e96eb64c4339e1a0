"""Seeded random numbers by counter: one stream for each purpose, none shifts another.

A stream is named by words and numbers (``SeedDraws(7).stream("fault", "cause")``). Draw i of a
stream is a function of (seed, name, i) alone, so a change of policy or of one rate leaves every
other stream as it was: two runs of one seed differ by what was changed and by nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeVar

T = TypeVar("T")
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: the step of splitmix64


class DrawStream:
    """Draws in order. ``at(i)`` gives the numbers of draw i whatever was drawn before."""

    __slots__ = ("_counter", "_key")

    def __init__(self, key: int) -> None:
        self._key = key
        self._counter = key

    def at(self, index: int) -> DrawStream:
        """A stream of its own for the thing with this number."""
        return DrawStream(_mixed(self._key ^ _mixed((index + 1) * _GOLDEN & _MASK)))

    def bits(self) -> int:
        """64 random bits."""
        self._counter = (self._counter + _GOLDEN) & _MASK
        return _mixed(self._counter)

    def uniform(self) -> float:
        """A number of [0, 1)."""
        return (self.bits() >> 11) * 2.0**-53

    def below(self, count: int) -> int:
        """An integer of [0, count)."""
        return self.bits() * count >> 64

    def between(self, low: float, high: float) -> float:
        """A number of [low, high)."""
        return low + (high - low) * self.uniform()

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.uniform() < probability

    def exponential(self, mean: float) -> float:
        """A waiting time."""
        return -mean * math.log(1.0 - self.uniform())

    def normal(self) -> float:
        """A standard normal number."""
        radius = math.sqrt(-2.0 * math.log(1.0 - self.uniform()))
        return radius * math.cos(2.0 * math.pi * self.uniform())

    def lognormal(self, median: float, sigma: float) -> float:
        """A positive number whose logarithm is normal."""
        return median * math.exp(sigma * self.normal())

    def factor(self, sigma: float) -> float:
        """A lognormal factor whose mean is one."""
        return self.lognormal(math.exp(-(sigma**2) / 2), sigma)

    def choice(self, options: Sequence[T]) -> T:
        """One of some."""
        return options[self.below(len(options))]


class SeedDraws:
    """All streams of one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def stream(self, *name: str | int) -> DrawStream:
        """The stream of a purpose."""
        text = "\x1f".join(map(str, (self.seed, *name)))
        return DrawStream(int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little"))


def _mixed(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)
