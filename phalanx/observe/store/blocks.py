"""Rows of numbers as one blob: bytes of the same weight side by side, then deflated.

Neighbouring values of a metric share their sign, exponent and first digits, so the high bytes of a
column compress to little; the low ones are noise and cost what they cost.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

LEVEL = 1  # higher ones take three times as long for a few per cent

Array = np.ndarray[Any, np.dtype[Any]]


def pack(values: Array) -> bytes:
    """An array of any shape; the reader must know type and shape."""
    data = np.ascontiguousarray(values)
    size = data.dtype.itemsize
    apart = np.ascontiguousarray(data.reshape(-1).view(np.uint8).reshape(-1, size).T)
    return zlib.compress(apart.tobytes(), LEVEL)


def unpack(blob: bytes, kind: str, shape: tuple[int, ...]) -> Array:
    """What ``pack`` was given; ValueError where the blob is damaged."""
    size = np.dtype(kind).itemsize
    try:
        flat = np.frombuffer(zlib.decompress(blob), np.uint8)
    except zlib.error as error:
        raise ValueError(f"a damaged block: {error}") from None
    together = np.ascontiguousarray(flat.reshape(size, -1).T)
    return together.reshape(-1).view(kind).reshape(shape)
