"""What every optimizer may be asked for beside its steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from phalanx.parallel import Weight
from phalanx.train.optim.guard import GradientVerdict


class WeightOptimizer:
    """Most evaluate the weights that they train, and need not know where those came from."""

    def step(self, learning_rate: float, verdict: GradientVerdict) -> None:
        """Apply one update unless the verdict says skip."""
        raise NotImplementedError

    def settle(self) -> None:
        """Returns when state that lives in host memory is there."""

    def tensors(self) -> dict[str, Tensor]:
        """State by name, with the layout of the parameters."""
        raise NotImplementedError

    def evaluated(self) -> AbstractContextManager[None]:
        """Inside, weights are those that this optimizer's method evaluates."""
        return nullcontext()

    def restart(self) -> None:
        """Weights were replaced by others, of which no state is known."""


@contextmanager
def replaced(weights: list[Weight], values: Iterable[Tensor]) -> Iterator[None]:
    """Inside, the masters of weights, and what computes with them, have other values."""
    trained = [weight.master.clone() for weight in weights]
    _put(weights, values)
    try:
        yield
    finally:
        _put(weights, trained)


@torch.no_grad()
def _put(weights: list[Weight], values: Iterable[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.master.copy_(value)
        weight.publish()
