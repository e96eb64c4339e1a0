"""Which values are dropped, in NumPy's unsigned arithmetic and without a line of the trainer's."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint64]


def kept_share(x: Tensor, rate: float, seed: int, place: str, samples: Tensor) -> Tensor:
    """By value of x [batch, seq, width]: 0 where it is dropped, else what makes up for those."""
    batch, length, width = x.shape
    assert len(samples) == batch
    digest = hashlib.blake2b(f"{seed}/{place}".encode(), digest_size=8).digest()
    tokens = mixed(mixed(samples.numpy().astype(np.uint64))[:, None] + counted(length))
    keys = mixed(tokens ^ np.frombuffer(digest, "<u8")[0])
    drawn = mixed(keys[..., None] + counted(width) * np.uint64(0x9E3779B97F4A7C15))
    signed = drawn.view(np.int64).astype(np.float64)
    kept = torch.from_numpy((signed + 2.0**63) / 2.0**64 >= rate)
    return kept.to(x.dtype) / (1 - rate)


def counted(count: int) -> Words:
    return np.arange(count, dtype=np.uint64)


def mixed(x: Words) -> Words:
    """SplitMix64's finaliser."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
