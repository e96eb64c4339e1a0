"""Rotary positions (RoPE): frequencies, how YaRN and others scale them for length, and tables."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phalanx.config import Model, RopeScaling


def rope_tables(
    config: Model, positions: Tensor, *, windowed: bool = False
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, rotated / 2] in fp32, of layers with or without the window."""
    theta, scaling = config.rope_theta, config.rope_scaling
    if windowed and config.window is not None:
        theta = config.window.rope_theta or theta
        scaling = scaling if config.window.rope_scaled else None
    rotated = int(config.head_dim * config.rotary_fraction)
    if config.latent is not None:
        rotated = config.latent.rope_head_dim
    exponent = torch.arange(0, rotated, 2, dtype=torch.float32, device=positions.device) / rotated
    frequency = theta**-exponent
    if scaling is not None:
        frequency = frequency * _stretch(scaling, frequency, theta)
    angle = positions.to(torch.float32)[:, None] * frequency
    if scaling is None or scaling.kind != "yarn":
        return angle.cos(), angle.sin()
    factor = scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1
    return angle.cos() * factor, angle.sin() * factor


def _stretch(scaling: RopeScaling, frequency: Tensor, theta: float) -> Tensor:
    """Factor on each frequency: one where it is kept, 1 / factor where it is stretched."""
    if scaling.kind == "linear":
        return torch.full_like(frequency, 1 / scaling.factor)
    if scaling.kind == "llama3":
        wavelength = 2 * math.pi / frequency
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        kept = ((scaling.original_context / wavelength - low) / (high - low)).clamp(0, 1)
    else:
        kept = _kept_by_yarn(scaling, frequency, theta)
    return kept + (1 - kept) / scaling.factor


def _kept_by_yarn(scaling: RopeScaling, frequency: Tensor, theta: float) -> Tensor:
    """One for dimensions that turn often within the old context, zero for those that do not."""
    width = 2 * len(frequency)

    def dimension(rotations: float) -> float:
        turns = scaling.original_context / (rotations * 2 * math.pi)
        return width * math.log(turns) / (2 * math.log(theta))

    first, last = dimension(scaling.fast_rotations), dimension(scaling.slow_rotations)
    if scaling.round_bounds:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    number = torch.arange(len(frequency), dtype=torch.float32, device=frequency.device)
    return 1 - ((number - first) / max(last - first, 0.001)).clamp(0, 1)
