"""An optimizer of one's own whose update is elementwise, and so the same on every mesh."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from phalanx.config import ConfigError
from phalanx.config import Optimizer as Settings
from phalanx.parallel import Weight
from phalanx.train.optim.base import WeightOptimizer
from phalanx.train.optim.groups import update_rule
from phalanx.train.optim.guard import GradientVerdict


class ElementwiseOptimizer(WeightOptimizer):
    """Derive from it and name the class in ``optimizer.module``.

    Masters, skipped steps, clipping, groups and checkpoints are taken care of.
    """

    state: ClassVar[tuple[str, ...]] = ()  # names of the tensors kept beside each parameter

    def __init__(self, weights: list[Weight], settings: Settings, offload: bool) -> None:
        if offload:
            rule = f"{type(self).__name__} keeps its state on the device"
            raise ConfigError("memory.offload", '"optimizer"', rule, 'set it to "none"')
        self.weights, self.settings = weights, settings
        self.step_count = torch.zeros((), device=weights[0].master.device)
        self._kept = [
            {name: torch.zeros_like(weight.master) for name in self.state} for weight in weights
        ]

    def update(
        self,
        weight: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        learning_rate: float,
        weight_decay: float,
    ) -> Tensor:
        """The new values of a block of fp32 weights; ``state`` is changed in place."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, learning_rate: float, verdict: GradientVerdict) -> None:
        """Apply one update unless the verdict says skip."""
        keep = ~verdict.skip
        self.step_count += keep.to(self.step_count)
        for weight, kept in zip(self.weights, self._kept, strict=True):
            if weight.frozen:
                continue
            rule = update_rule(weight, self.settings)
            moved = {name: tensor.clone() for name, tensor in kept.items()}
            gradient = weight.gradient.float() * verdict.multiplier
            rate = learning_rate * rule.rate_factor
            new = self.update(weight.master, gradient, moved, rate, rule.weight_decay)
            weight.master.copy_(torch.where(keep, new, weight.master))
            for name, tensor in kept.items():
                tensor.copy_(torch.where(keep, moved[name], tensor))
            weight.publish()

    def tensors(self) -> dict[str, Tensor]:
        """State by name, with the layout of the parameters."""
        found = {"optimizer.step": self.step_count}
        for weight, kept in zip(self.weights, self._kept, strict=True):
            for name, tensor in kept.items():
                found[f"optimizer.{name}.{weight.name}"] = weight.like(tensor)
        return found
