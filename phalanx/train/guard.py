"""Clipping, and the decision to skip a bad step, made on the device without a host read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.config import Optimizer
from phalanx.parallel import Weight

MEAN_DECAY = 0.98  # of the running mean of gradient norms
WARMUP_STEPS = 20  # good steps before a spike can be told from the start of training


class Verdict(NamedTuple):
    """What to do with a step's gradients; all are scalars on the device."""

    multiplier: Tensor  # for every gradient
    skip: Tensor  # bool
    overflowed: Tensor  # bool: the norm is not finite


class Guard:
    """Judges the gradient norm of each step."""

    def __init__(self, optimizer: Optimizer, device: torch.device, *, always_finite: bool) -> None:
        self.config = optimizer
        self.always_finite = always_finite  # fp16: an overflow is part of the method
        self.mean = torch.zeros((), device=device)
        self.good_steps = torch.zeros((), device=device)

    def judge(self, norm: Tensor, loss_scale: Tensor) -> Verdict:
        """``norm`` is that of the true gradients; stored are ``loss_scale`` times those."""
        multiplier = torch.ones_like(norm)
        if self.config.clip_norm > 0:
            multiplier = (self.config.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        overflowed = ~torch.isfinite(norm)
        skip = torch.zeros_like(overflowed)
        if self.config.skip_non_finite or self.always_finite:
            skip = overflowed.clone()
        if self.config.spike_factor > 0:
            settled = self.good_steps >= WARMUP_STEPS
            skip |= settled & (norm > self.config.spike_factor * self.mean)
        self._remember(norm, skip | overflowed)
        return Verdict(multiplier / loss_scale, skip, overflowed)

    def _remember(self, norm: Tensor, bad: Tensor) -> None:
        first = self.good_steps == 0
        updated = torch.where(first, norm, torch.lerp(norm, self.mean, MEAN_DECAY))
        self.mean.copy_(torch.where(bad, self.mean, updated))
        self.good_steps += (~bad).float()


def squared_norm(weights: list[Weight]) -> Tensor:
    """This rank's share of the squared gradient norm; the sum over all ranks is the whole."""
    gradients = [weight.gradient for weight in weights]
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    # Scalars travel with the kernel; a tensor of them would make the host wait for the device.
    shares = torch._foreach_mul(norms, [weight.copies**-0.5 for weight in weights])
    return torch.stack(shares).square().sum()
