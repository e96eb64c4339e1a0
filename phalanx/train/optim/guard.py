"""Clipping, and the decision to skip a bad step, made on the device without a host read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.config import Optimizer
from phalanx.parallel import Weight

MEAN_DECAY = 0.98  # of the running mean of gradient norms
WARMUP_STEPS = 20  # good steps before a spike can be told from the start of training
MOST_SPIKES = 10  # in a row; norms that stay so high are the new level, which is learned anew
SPIKE_MEANS = 4.0  # as which a spike enters the mean at most, so that a few hardly change it
SETTLED = WARMUP_STEPS + MOST_SPIKES


class GradientVerdict(NamedTuple):
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
        # Counts up to the end of the warm-up, and then stands at ``SETTLED`` less the spikes since
        # the last good step.
        self.good_steps = torch.zeros((), device=device)

    def judge(
        self, norm: Tensor, loss_scale: Tensor, empty: Tensor | None = None
    ) -> GradientVerdict:
        """``norm`` is that of the true gradients; stored are ``loss_scale`` times those.

        ``empty`` says that no token had a label: there is nothing to apply, and to learn from.
        """
        multiplier = torch.ones_like(norm)
        if self.config.clip_norm > 0:
            multiplier = (self.config.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        overflowed = ~torch.isfinite(norm)
        skip = torch.zeros_like(overflowed)
        if self.config.skip_non_finite or self.always_finite:
            skip = overflowed.clone()
        unknown = overflowed if empty is None else overflowed | empty
        spike = torch.zeros_like(overflowed)
        if (factor := self.config.spike_factor) > 0:
            spike = (self.good_steps >= WARMUP_STEPS) & (norm > factor * self.mean) & ~unknown
        self._remember(norm, spike, unknown)
        skip = skip | spike if empty is None else skip | spike | empty
        return GradientVerdict(multiplier / loss_scale, skip, overflowed)

    def _remember(self, norm: Tensor, spike: Tensor, unknown: Tensor) -> None:
        """Learn from a norm. Spikes are cut down, and still raise the mean where they are many."""
        first = self.good_steps == 0
        most = min(self.config.spike_factor, SPIKE_MEANS) * self.mean
        seen = torch.where(spike, most, norm)
        updated = torch.where(first, seen, torch.lerp(seen, self.mean, MEAN_DECAY))
        self.mean.copy_(torch.where(unknown, self.mean, updated))
        warm = self.good_steps + 1 >= WARMUP_STEPS
        good = torch.where(warm, SETTLED, self.good_steps + 1)
        left = self.good_steps.clamp(max=SETTLED) - 1
        after = torch.where(spike, torch.where(left > WARMUP_STEPS, left, 0.0), good)
        self.good_steps.copy_(torch.where(unknown, self.good_steps, after))


def squared_norm(weights: list[Weight]) -> Tensor:
    """This rank's share of the squared gradient norm; the sum over all ranks is the whole."""
    weights = [weight for weight in weights if not weight.frozen]
    if not weights:
        return torch.zeros(())
    gradients = [weight.gradient for weight in weights]
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    # Scalars travel with the kernel; a tensor of them would make the host wait for the device.
    shares = torch._foreach_mul(norms, [weight.copies**-0.5 for weight in weights])
    return torch.stack(shares).square().sum()
