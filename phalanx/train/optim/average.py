"""A moving average of the weights (EMA), kept in fp32 where the weights are."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from phalanx.config import Ema
from phalanx.parallel import Weight
from phalanx.train.optim.base import replaced


class WeightAverage:
    """One tensor for each block that this rank holds; none without settings."""

    def __init__(self, weights: list[Weight], settings: Ema | None) -> None:
        self._settings = settings
        averaged = weights if settings is not None else []
        self._pairs = [(weight, weight.master.clone()) for weight in averaged]

    @torch.no_grad()
    def restart(self) -> None:
        """From the weights as they are."""
        for weight, average in self._pairs:
            average.copy_(weight.master)

    @torch.no_grad()
    def update(self, step: int, skip: Tensor) -> None:
        """After step ``step``, counted from one; one that was skipped leaves the average.

        Until ``begin_step`` the average is the weights.
        """
        settings = self._settings
        if settings is None or step % settings.every:
            return
        decay = settings.decay if step > settings.begin_step else 0.0
        share = (1.0 - decay) * ~skip
        for weight, average in self._pairs:
            average.lerp_(weight.master, share.to(average))

    def evaluated(self) -> AbstractContextManager[None]:
        """Inside, weights are the average, where that is what validation takes."""
        if self._settings is None or not self._settings.validate:
            return nullcontext()
        weights = [weight for weight, _ in self._pairs]
        return replaced(weights, [average for _, average in self._pairs])

    def tensors(self) -> dict[str, Tensor]:
        """By name, with the layout of the parameters."""
        return {f"ema.{weight.name}": weight.like(average) for weight, average in self._pairs}
