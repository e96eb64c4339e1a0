"""The order of samples: a keyed bijection of ``range(count)``, computed per index.

An alternating Feistel network over the smallest power of two that holds ``count``; values that
fall outside walk on along their cycle, fewer than two rounds of walking on average. Nothing is
stored, so an order over 10^12 samples costs what one over ten costs.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
MAX_COUNT = 1 << 62  # leaves head room in signed 64-bit sample numbers

Key: TypeAlias = tuple[int, ...]  # one 64-bit number for each round

_WORD = (1 << 64) - 1
_MULTIPLIER_1 = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
_MULTIPLIER_2 = 0xD6E8FEB86659FD93


def order_key(seed: int, epoch: int, split: str) -> Key:
    """Key of one epoch's order, hashed so that (seed 7, epoch 1) shares nothing with (8, 0)."""
    text = f"phalanx order 1|{seed}|{epoch}|{split}".encode()
    digest = hashlib.blake2b(text, digest_size=8 * ROUNDS).digest()
    return tuple(int.from_bytes(digest[at : at + 8], "little") for at in range(0, 8 * ROUNDS, 8))


def permute(index: int, count: int, key: Key) -> int:
    """Position ``index`` of the order holds this sample of ``range(count)``."""
    _check(index, index, count)
    bits = _domain_bits(count)
    value = _scalar_rounds(index, bits, key)
    while value >= count:
        value = _scalar_rounds(value, bits, key)
    return value


def permute_many(indices: NDArray[np.int64], count: int, key: Key) -> NDArray[np.int64]:
    """``permute`` for an array of indices, with the same answers."""
    if indices.size == 0:
        return np.zeros(indices.shape, np.int64)
    _check(int(indices.min()), int(indices.max()), count)
    bits = _domain_bits(count)
    values = _array_rounds(indices.astype(np.uint64), bits, key)
    while (outside := values >= np.uint64(count)).any():
        values[outside] = _array_rounds(values[outside], bits, key)
    return values.astype(np.int64)


def _check(least: int, most: int, count: int) -> None:
    if not 0 < count <= MAX_COUNT:
        raise ValueError(f"count = {count}: must be between 1 and 2^62")
    if least < 0 or most >= count:
        raise IndexError(f"index {least if least < 0 else most} is outside range({count})")


def _domain_bits(count: int) -> int:
    return max(2, (count - 1).bit_length())  # two bits at least, so that both halves exist


def _scalar_rounds(value: int, bits: int, key: Key) -> int:
    low_bits = bits // 2
    high_bits = bits - low_bits
    high, low = value >> low_bits, value & ((1 << low_bits) - 1)
    for number, round_key in enumerate(key):
        if number % 2 == 0:
            high ^= _scalar_mix(low, round_key) >> (64 - high_bits)
        else:
            low ^= _scalar_mix(high, round_key) >> (64 - low_bits)
    return (high << low_bits) | low


def _scalar_mix(half: int, round_key: int) -> int:
    mixed = ((half + round_key) & _WORD) * _MULTIPLIER_1 & _WORD
    mixed ^= mixed >> 32
    return mixed * _MULTIPLIER_2 & _WORD


def _array_rounds(values: NDArray[np.uint64], bits: int, key: Key) -> NDArray[np.uint64]:
    low_bits = bits // 2
    high_bits = bits - low_bits
    high = values >> np.uint64(low_bits)
    low = values & np.uint64((1 << low_bits) - 1)
    for number, round_key in enumerate(key):
        if number % 2 == 0:
            high ^= _array_mix(low, round_key) >> np.uint64(64 - high_bits)
        else:
            low ^= _array_mix(high, round_key) >> np.uint64(64 - low_bits)
    return (high << np.uint64(low_bits)) | low


def _array_mix(half: NDArray[np.uint64], round_key: int) -> NDArray[np.uint64]:
    # Array arithmetic on uint64 wraps silently, as the masks above do by hand.
    mixed = (half + np.uint64(round_key)) * np.uint64(_MULTIPLIER_1)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(_MULTIPLIER_2)
    return mixed
