"""Schedule-Free AdamW (Defazio and others, 2024): no decay of the rate, and no end to plan for.

Three sequences of weights: the fast ones take AdamW's steps, the evaluated ones are their running
mean, and gradients are taken between the two. Masters hold the last, where gradients are taken;
the fast ones are kept beside them, and the evaluated ones follow from both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from phalanx.config import Optimizer as Settings
from phalanx.parallel import Weight
from phalanx.train.optim.base import WeightOptimizer, replaced
from phalanx.train.optim.groups import update_rule
from phalanx.train.optim.guard import GradientVerdict


class ScheduleFreeAdamW(WeightOptimizer):
    """``beta1`` is how near to the evaluated weights gradients are taken."""

    def __init__(self, weights: list[Weight], settings: Settings) -> None:
        self.weights, self.settings = weights, settings
        device = weights[0].master.device
        self.step_count = torch.zeros((), device=device)
        self.rate_squares = torch.zeros((), device=device)  # sum of those of all steps
        self.fast = [weight.master.clone() for weight in weights]
        self.second = [torch.zeros_like(weight.master) for weight in weights]

    @torch.no_grad()
    def step(self, learning_rate: float, verdict: GradientVerdict) -> None:
        """Apply one update unless the verdict says skip."""
        keep = ~verdict.skip
        self.step_count += keep.to(self.step_count)
        self.rate_squares += learning_rate**2 * keep
        share = learning_rate**2 / self.rate_squares.clamp(min=1e-30)  # of this step in the mean
        for at, weight in enumerate(self.weights):
            if not weight.frozen:
                self._update(at, weight, learning_rate, share, verdict, keep)

    def _update(
        self,
        at: int,
        weight: Weight,
        learning_rate: float,
        share: Tensor,
        verdict: GradientVerdict,
        keep: Tensor,
    ) -> None:
        settings, master, fast, second = (
            self.settings,
            weight.master,
            self.fast[at],
            self.second[at],
        )
        rule = update_rule(weight, settings)
        rate = learning_rate * rule.rate_factor * weight.width_rate
        gradient = weight.gradient.float() * verdict.multiplier
        squares = second * settings.beta2 + gradient * gradient * (1 - settings.beta2)
        known = 1 - settings.beta2**self.step_count
        direction = gradient / ((squares / known).sqrt() + settings.eps)
        direction = direction + rule.weight_decay * master
        moved = fast - rate * direction
        # The mean takes in the fast weights, and the masters lie between the two again.
        near = torch.lerp(master, fast, share)
        between = near - rate * (1 - settings.beta1 * (1 - share)) * direction
        for target, value in ((second, squares), (fast, moved), (master, between)):
            target.copy_(torch.where(keep, value, target))
        weight.publish()

    def evaluated(self) -> AbstractContextManager[None]:
        """Inside, weights are the running mean of the fast ones."""
        beyond = 1 - 1 / self.settings.beta1  # masters lie beta1 of the way from fast to mean
        means = (torch.lerp(w.master, fast, beyond) for w, fast in self._pairs())
        return replaced(self.weights, means)

    def _pairs(self) -> Iterator[tuple[Weight, Tensor]]:
        return zip(self.weights, self.fast, strict=True)

    @torch.no_grad()
    def restart(self) -> None:
        """All three sequences begin with the weights as they are."""
        for weight, fast in self._pairs():
            fast.copy_(weight.master)

    def tensors(self) -> dict[str, Tensor]:
        """State by name, with the layout of the parameters."""
        state = {"optimizer.step": self.step_count, "optimizer.rate_squares": self.rate_squares}
        for at, weight in enumerate(self.weights):
            state[f"optimizer.fast.{weight.name}"] = weight.like(self.fast[at])
            state[f"optimizer.exp_avg_sq.{weight.name}"] = weight.like(self.second[at])
        return state
