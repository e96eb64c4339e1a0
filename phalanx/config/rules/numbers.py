"""The nearest number that would have worked."""

from __future__ import annotations


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, in order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of ``number`` closest to ``wanted``; the smaller of two equally close."""
    return min(divisors(number), key=lambda d: (abs(d - wanted), d))


def nearest_multiple(number: int, unit: int) -> int:
    """The positive multiple of ``unit`` closest to ``number``."""
    return max(1, round(number / unit)) * unit
