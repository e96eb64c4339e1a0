"""The order of samples: a keyed bijection of ``range(count)``, computed per index.

An alternating Feistel network over the smallest power of two that holds ``count``; values that
fall outside walk on along their cycle, fewer than two rounds of walking on average. Nothing is
stored, so an order over 10^12 samples costs what one over ten costs.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
MAX_COUNT = 1 << 62  # leaves head room in signed 64-bit sample numbers

Key: TypeAlias = tuple[int, ...]  # one 64-bit number for each round
Keys: TypeAlias = NDArray[np.uint64]  # [ROUNDS, n]: a key for each index
Words: TypeAlias = NDArray[np.uint64]

_MULTIPLIER_1 = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
_MULTIPLIER_2 = 0xD6E8FEB86659FD93


@lru_cache(maxsize=4096)
def order_key(seed: int, source: str, epoch: int, part: str = "samples", number: int = 0) -> Key:
    """Key of one order, hashed so that (seed 7, epoch 1) shares nothing with (8, 0)."""
    text = "phalanx order 2" + json.dumps([seed, source, epoch, part, number])
    digest = hashlib.blake2b(text.encode(), digest_size=8 * ROUNDS).digest()
    return tuple(int.from_bytes(digest[at : at + 8], "little") for at in range(0, 8 * ROUNDS, 8))


def permute_many(
    indices: NDArray[np.int64], count: int | NDArray[np.int64], key: Key | Keys
) -> NDArray[np.int64]:
    """Samples of ``range(count)`` that stand at ``indices``; one count and key, or one for each."""
    if indices.size == 0:
        return np.zeros(indices.shape, np.int64)
    counts = np.asarray(count, np.int64)
    _check(indices, counts)
    limits, bits = counts.astype(np.uint64), _many_bits(counts)
    keys = key if isinstance(key, np.ndarray) else np.array(key, np.uint64)[:, None]
    values = _array_rounds(indices.astype(np.uint64), bits, keys)
    walking = np.flatnonzero(values >= limits)
    while walking.size:
        moved = _array_rounds(values[walking], _chosen(bits, walking), _chosen(keys, walking))
        values[walking] = moved
        walking = walking[moved >= _chosen(limits, walking)]
    return values.astype(np.int64)


def _chosen(each: Words, rows: NDArray[np.intp]) -> Words:
    """The values that belong to some of the indices; a value for all of them stays."""
    return each[..., rows] if each.ndim and each.shape[-1] > 1 else each


def _check(indices: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
    if not 0 < int(counts.min()) <= int(counts.max()) <= MAX_COUNT:
        raise ValueError(f"count = {counts.min()} to {counts.max()}: must be between 1 and 2^62")
    outside = (indices < 0) | (indices >= counts)
    if outside.any():
        at = np.flatnonzero(outside)[0]
        index, count = np.broadcast_to(indices, outside.shape).flat[at], counts.flat[-1]
        raise IndexError(f"index {index} is outside range({count})")


def _domain_bits(count: int) -> int:
    return max(2, (count - 1).bit_length())  # two bits at least, so that both halves exist


def _many_bits(counts: NDArray[np.int64]) -> Words:
    if counts.ndim == 0:
        return np.array(_domain_bits(int(counts)), np.uint64)
    different, which = np.unique(counts, return_inverse=True)
    return np.array([_domain_bits(count) for count in different.tolist()], np.uint64)[which]


def _array_rounds(values: Words, bits: Words, keys: Keys) -> Words:
    low_bits = bits >> np.uint64(1)
    high_shift = np.uint64(64) - (bits - low_bits)
    low_shift = np.uint64(64) - low_bits
    high = values >> low_bits
    low = values & ((np.uint64(1) << low_bits) - np.uint64(1))
    for number, round_key in enumerate(keys):
        if number % 2 == 0:
            high ^= _array_mix(low, round_key) >> high_shift
        else:
            low ^= _array_mix(high, round_key) >> low_shift
    joined: Words = (high << low_bits) | low
    return joined


def _array_mix(half: Words, round_key: Words) -> Words:
    # Array arithmetic on uint64 wraps silently, as the masks above do by hand.
    mixed = (half + round_key) * np.uint64(_MULTIPLIER_1)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(_MULTIPLIER_2)
    return mixed
