"""The two moments of AdamW as they are stored: fp32, bf16, or 8 bits with a scale for each block.

What has fewer bits is rounded up or down by chance, so that small changes add up to what they
should be; the chance is a function of the update's number and the element's place alone.

    bfloat16  the upper half of the fp32
    int8      first moment: a sign and the root of its share of the block's largest, in 127 steps;
              second: the fourth root of its share, in 255 steps, of which 0 stays for 0 alone

A block is 128 neighbours of a row, so that shards of rows hold whole blocks. Vectors, and matrices
whose rows are no multiple of a block, keep fp32: they are few.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.config import STATE_BLOCK, StateFormat

FIRST_STEPS, SECOND_STEPS = 127, 255


class Moments(NamedTuple):
    """Of one weight, or of a stretch of one."""

    first: Tensor
    second: Tensor
    first_scale: Tensor | None = None  # of each block, in 8 bits
    second_scale: Tensor | None = None

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """The tensors there are."""
        return tuple(each for each in self if each is not None)

    @property
    def in_blocks(self) -> bool:
        return self.first_scale is not None


def zero_moments(master: Tensor, row: int, format: StateFormat) -> Moments:
    """Moments of a fresh weight; ``row``: length of the whole parameter's rows."""
    if format == "int8" and master.dim() > 1 and row % STATE_BLOCK == 0:
        blocks = (*master.shape[:-1], master.shape[-1] // STATE_BLOCK)
        return Moments(
            torch.zeros_like(master, dtype=torch.int8),
            torch.zeros_like(master, dtype=torch.uint8),
            master.new_zeros(blocks),
            master.new_zeros(blocks),
        )
    dtype = torch.bfloat16 if format == "bfloat16" else torch.float32
    return Moments(*(torch.zeros_like(master, dtype=dtype) for _ in range(2)))


def decode(moments: Moments) -> tuple[Tensor, Tensor]:
    """Both in fp32."""
    if moments.first_scale is None or moments.second_scale is None:
        return moments.first.float(), moments.second.float()
    first = _blocks(moments.first.float()) / FIRST_STEPS
    second = _blocks(moments.second.float()) / SECOND_STEPS
    return (
        (first * first.abs() * moments.first_scale.view(-1, 1)).view(moments.first.shape),
        (second.square().square() * moments.second_scale.view(-1, 1)).view(moments.second.shape),
    )


def encode(moments: Moments, first: Tensor, second: Tensor, seed: int) -> Moments:
    """What to store for two fp32 moments; ``seed`` decides about every rounding."""
    if moments.first.dtype == torch.float32:
        return Moments(first, second)
    chance = torch.Generator(first.device).manual_seed(seed)
    if not moments.in_blocks:
        return Moments(_as_bf16(first, chance), _as_bf16(second, chance))
    first, second = _blocks(first), _blocks(second)
    scales = [each.abs().amax(1, keepdim=True) for each in (first, second)]
    ours, theirs = (
        each.abs() / torch.where(scale > 0, scale, 1.0)
        for each, scale in zip((first, second), scales, strict=True)
    )
    code = _rounded(ours, ours.sqrt(), 2, FIRST_STEPS, chance) * first.sign()
    square = _rounded(theirs, theirs.sqrt().sqrt(), 4, SECOND_STEPS, chance)
    square = torch.where(theirs > 0, square.clamp(min=1.0), 0.0)
    assert moments.first_scale is not None
    return Moments(
        code.to(torch.int8).view(moments.first.shape),
        square.to(torch.uint8).view(moments.second.shape),
        *(scale.view(moments.first_scale.shape) for scale in scales),
    )


def _blocks(x: Tensor) -> Tensor:
    return x.reshape(-1, STATE_BLOCK)


def _as_bf16(x: Tensor, chance: torch.Generator) -> Tensor:
    noise = torch.randint(0, 1 << 16, x.shape, generator=chance, dtype=torch.int32, device=x.device)
    bits = (x.view(torch.int32) + noise) & -(1 << 16)
    return bits.view(torch.float32).to(torch.bfloat16)


def _rounded(
    share: Tensor, root: Tensor, power: int, steps: int, chance: torch.Generator
) -> Tensor:
    """The step below or above, so often that the mean is ``share``."""
    below = (root * steps).floor().clamp(max=steps - 1)
    low, high = (below / steps) ** power, ((below + 1) / steps) ** power
    drawn = torch.rand(share.shape, generator=chance, device=share.device)
    return below + (drawn * (high - low) < share - low)
