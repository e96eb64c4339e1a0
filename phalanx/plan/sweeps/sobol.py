"""Sobol sequence: points that fill a cube evenly for any number of points.

Direction numbers are those of Joe and Kuo (2008). A digital shift drawn from a seed moves all
points alike, so that the first is no corner and two seeds give two sweeps.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

BITS = 32
# Of each further dimension: coefficients of its primitive polynomial, and first direction numbers.
_JOE_KUO: tuple[tuple[int, tuple[int, ...]], ...] = (
    (0, (1,)),
    (1, (1, 3)),
    (1, (1, 3, 1)),
    (2, (1, 1, 1)),
    (1, (1, 1, 3, 3)),
    (4, (1, 3, 5, 13)),
    (2, (1, 1, 5, 5, 17)),
    (4, (1, 1, 5, 5, 5)),
    (7, (1, 1, 7, 11, 19)),
    (11, (1, 1, 5, 1, 1)),
    (13, (1, 1, 1, 3, 11)),
    (14, (1, 3, 5, 5, 31)),
    (1, (1, 3, 3, 9, 7, 49)),
    (13, (1, 1, 1, 15, 21, 21)),
    (16, (1, 3, 1, 13, 27, 49)),
    (19, (1, 1, 1, 15, 7, 5)),
    (22, (1, 3, 1, 15, 13, 25)),
    (25, (1, 1, 5, 5, 19, 61)),
    (1, (1, 3, 7, 11, 23, 15, 103)),
)
MOST_DIMENSIONS = len(_JOE_KUO) + 1


def sobol_points(dimensions: int, count: int, seed: int | None) -> Iterator[tuple[float, ...]]:
    """Points in [0, 1) of each dimension; without a seed they begin in the corner."""
    assert 1 <= dimensions <= MOST_DIMENSIONS
    directions = [_directions(dimension) for dimension in range(dimensions)]
    draws = random.Random(seed)
    point = [0 if seed is None else draws.getrandbits(BITS) for _ in range(dimensions)]
    for number in range(count):
        yield tuple(value / (1 << BITS) for value in point)
        turned = (~number & (number + 1)).bit_length() - 1  # the lowest bit that is 0
        for dimension in range(dimensions):
            point[dimension] ^= directions[dimension][turned]


def _directions(dimension: int) -> list[int]:
    """By bit of the Gray code: what it turns in a coordinate."""
    if dimension == 0:
        return [1 << (BITS - 1 - bit) for bit in range(BITS)]
    coefficients, first = _JOE_KUO[dimension - 1]
    degree = len(first)
    numbers = [value << (BITS - 1 - bit) for bit, value in enumerate(first)]
    for bit in range(degree, BITS):
        value = numbers[bit - degree] ^ (numbers[bit - degree] >> degree)
        for back in range(1, degree):
            if coefficients >> (degree - 1 - back) & 1:
                value ^= numbers[bit - back]
        numbers.append(value)
    return numbers
