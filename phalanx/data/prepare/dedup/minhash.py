"""MinHash: numbers that two texts share with the probability of their Jaccard similarity.

The set of a text are its word n-grams. ``rows`` minima at a time are hashed into a key, of which
a text has ``bands``; texts that share a key are candidates. The sketch of a text, its smallest
n-gram hashes, then says how similar two are: exactly up to ``SKETCH`` n-grams, beyond that with a
standard error of 0.0125 at 0.8.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.data.prepare.words import Hashes, TextView, mix, ngram_hashes

SKETCH = 1024  # n-gram hashes kept of a text
MOST_HASHES = 128  # bands x rows
_CHUNK = 4096  # n-grams hashed at once, so that intermediates stay in the cache

Sketch = NDArray[np.uint32]


class Banding(NamedTuple):
    """How many minima make a key, and how many keys a text has."""

    bands: int
    rows: int

    def probability(self, jaccard: float) -> float:
        """That two texts of this similarity share a key."""
        return float(1 - (1 - jaccard**self.rows) ** self.bands)


@cache
def choose_banding(jaccard: float, recall: float) -> Banding:
    """The most rows (fewest false candidates) that find such pairs with this probability."""
    for rows in range(20, 0, -1):
        bands = math.ceil(math.log(1 - recall) / math.log(1 - jaccard**rows))
        if bands * rows <= MOST_HASHES:
            return Banding(bands, rows)
    return Banding(MOST_HASHES, 1)


def shingles(view: TextView, words: int) -> Hashes:
    """Different n-grams of a text, sorted; of a shorter one, all its words; never none."""
    hashes = ngram_hashes(view.word_hashes, min(words, max(1, len(view.words))))
    return np.unique(hashes) if len(hashes) else np.zeros(1, np.uint64)


def sketch(ngrams: Hashes) -> Sketch:
    """The smallest hashes of a sorted set."""
    return (ngrams[:SKETCH] >> np.uint64(32)).astype(np.uint32)


def similarity(one: Sketch, other: Sketch) -> float:
    """Jaccard similarity of two texts by their sketches."""
    both = np.concatenate((one, other))
    both.sort()
    twice = both[1:][both[1:] == both[:-1]]  # members of both
    different = len(both) - len(twice)
    if len(one) < SKETCH and len(other) < SKETCH:
        return len(twice) / different
    # Only the smallest of the union are a fair sample of it.
    last = np.unique(both)[min(SKETCH, different) - 1]
    return float(np.count_nonzero(twice <= last)) / min(SKETCH, different)


class MinHasher:
    """Keys of texts for one banding; the same on every machine."""

    def __init__(self, banding: Banding) -> None:
        self.banding = banding
        count = banding.bands * banding.rows
        constants = mix(np.arange(1, 2 * count + 1, dtype=np.uint64))
        self._factors = ((constants[:count] >> np.uint64(32)).astype(np.uint32) | np.uint32(1))[
            :, None
        ]
        self._terms = (constants[count:] >> np.uint64(32)).astype(np.uint32)[:, None]

    def keys(self, ngrams: Hashes) -> Hashes:
        """One key a band."""
        short = (ngrams ^ (ngrams >> np.uint64(29))).astype(np.uint32)  # 32 bits multiply faster
        minima = np.full(len(self._factors), 0xFFFFFFFF, np.uint32)
        for start in range(0, len(short), _CHUNK):
            hashed = self._factors * short[None, start : start + _CHUNK]
            hashed += self._terms
            np.minimum(minima, hashed.min(axis=1), out=minima)
        rows = minima.reshape(self.banding).astype(np.uint64)
        keys = np.arange(self.banding.bands, dtype=np.uint64)
        for row in rows.T:
            keys = mix((keys ^ row) * np.uint64(0x9E3779B97F4A7C15))
        return keys
