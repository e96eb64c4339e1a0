"""Initial weights as a function of (seed, name, element): the same for every mesh.

Each element is drawn by hashing its global index, so a rank fills just the block it holds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.config import Model
from phalanx.model.declare import Declaration

_CHUNK = 1 << 24  # elements drawn at once: bounds the memory of the int64 work


def key_of(seed: int, name: str) -> int:
    """64-bit key of a parameter."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class WidthFactors(NamedTuple):
    """What µP multiplies for a parameter, so that settings of one width serve another."""

    std: float  # of its initial values
    rate: float  # at which AdamW learns it


def width_factors(declaration: Declaration, config: Model, dims: int) -> WidthFactors:
    """Of a parameter with so many dims; by how much wider the model is than ``width_base``."""
    role = declaration.width or ("hidden" if dims > 1 else "fixed")
    if not config.width_base or role == "fixed":
        return WidthFactors(1.0, 1.0)
    narrower = config.width_base / config.dim
    return WidthFactors(narrower if role == "output" else math.sqrt(narrower), narrower)


@torch.no_grad()
def draw(
    block: Tensor,
    declaration: Declaration,
    config: Model,
    *,
    key: int,
    shape: Sequence[int],
    offset: Sequence[int],
) -> None:
    """Give a parameter's block its initial values, as declared."""
    if declaration.start is not None:
        block.fill_(declaration.start)
        return
    # Residual branches start small: so many of them add up.
    depth = math.sqrt(2 * config.layers) if declaration.residual else 1.0
    std = declaration.std / depth * width_factors(declaration, config, len(shape)).std
    fill(block, std=std, key=key, shape=shape, offset=offset)


@torch.no_grad()
def fill(
    block: Tensor, *, std: float, key: int, shape: Sequence[int], offset: Sequence[int]
) -> None:
    """Normal values for ``block``, which lies at ``offset`` of a parameter of ``shape``."""
    if block.numel() == 0:
        return
    rows, row = block.shape[0], block[0].numel()
    step = max(1, _CHUNK // max(row, 1))
    for start in range(0, rows, step):
        part = block[start : start + step]
        index = _global_index(part.shape, (offset[0] + start, *offset[1:]), shape, block.device)
        part.copy_((_normal(index, key) * std).view(part.shape))


def _global_index(
    extent: Sequence[int], offset: Sequence[int], shape: Sequence[int], device: torch.device
) -> Tensor:
    """Flat global index of every element of a rectangular block."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, first, whole in zip(extent, offset, shape, strict=True):
        axis = torch.arange(first, first + size, device=device)
        index = index.unsqueeze(-1) * whole + axis
    return index.flatten()


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 (arithmetic wraps as unsigned would)."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ _logical_shift(x, shift)) * factor
    return x ^ _logical_shift(x, 31)


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _normal(index: Tensor, key: int) -> Tensor:
    """Standard normal of each index by Box-Muller on two halves of one 64-bit hash."""
    bits = mix(mix(index + key) ^ key)
    low = (bits & 0xFFFFFFFF).to(torch.float64)
    high = _logical_shift(bits, 32).to(torch.float64)
    radius = torch.sqrt(-2.0 * torch.log((low + 0.5) / 2.0**32))
    return (radius * torch.cos(2.0 * math.pi * high / 2.0**32)).to(torch.float32)
