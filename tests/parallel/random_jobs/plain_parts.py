"""Small parts of a plain model: rotary positions, and which rows of a fused matrix are whose."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.config import Model


def kept_widths(
    names: Sequence[str], adapted: Sequence[str], widths: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    return widths and tuple(w for n, w in zip(names, widths, strict=True) if n in adapted)


def rows_of(
    names: Sequence[str], adapted: Sequence[str], widths: tuple[int, ...] | None, rows: int
) -> dict[str, Tensor]:
    """Which rows belong to each matrix of those that lie in turn in one."""
    widths = widths or (rows,)
    owner = torch.arange(len(widths)).repeat_interleave(torch.tensor(widths))
    owner = owner.repeat(rows // len(owner))
    return {n: (owner == i).nonzero()[:, 0] for i, n in enumerate(names) if n in adapted}


def gate_groups(ffn: int) -> int:
    """Groups in which gates and ups lie: as many as divide the width, up to 64 of 16 or more."""
    groups = 64
    while groups > 1 and (ffn % groups or ffn // groups < 16):
        groups //= 2
    return groups


def is_each(number: int, every: int) -> bool:
    return every > 0 and (number + 1) % every == 0


def frequencies(model: Model, rotated: int, windowed: bool) -> tuple[Tensor, float]:
    """Rotations a token of each pair, and the factor of YaRN."""
    theta, scaling = model.rope_theta, model.rope_scaling
    if windowed and model.window is not None:
        theta = model.window.rope_theta or theta
        scaling = scaling if model.window.rope_scaled else None
    plain = theta ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    if scaling is None:
        return plain, 1.0
    slow, old = plain / scaling.factor, scaling.original_context
    if scaling.kind == "linear":
        return slow, 1.0
    if scaling.kind == "llama3":
        waves = old * plain / (2 * math.pi)
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        smooth = (waves - low) / (high - low)
        mixed = (1 - smooth) * slow + smooth * plain
        return torch.where(waves < low, slow, torch.where(waves > high, plain, mixed)), 1.0

    def bound(turns: float) -> float:
        return rotated * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = bound(scaling.fast_rotations), bound(scaling.slow_rotations)
    if scaling.round_bounds:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotated - 1)
    ramp = ((torch.arange(rotated // 2) - first) / max(last - first, 0.001)).clamp(0, 1)
    factor = scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1
    return slow * ramp + plain * (1 - ramp), factor
