"""Number formats: compute type, fp32 masters beside low-precision weights, loss scaling."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.config import Precision


def compute_dtype(precision: Precision) -> torch.dtype:
    """The type of weights and activations in forward and backward."""
    found = getattr(torch, precision.compute)
    assert isinstance(found, torch.dtype)
    return found


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Hold the parameters in ``dtype``; buffers keep theirs."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


class MainGradients:
    """Accumulates low-precision gradients in fp32 over the micro-batches of a step.

    Each parameter that is trained gets a ``main_grad``. While ``drain`` is set, the gradient of
    every backward moves there as soon as it exists; DDP moves the last one itself, after reducing
    it.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.drain = True
        self.parameters = [each for each in parameters if each.requires_grad]
        for parameter in self.parameters:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(self._accumulate)

    def _accumulate(self, parameter: Tensor) -> None:
        if self.drain:
            move_to_main(parameter)

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.main_grad.zero_()  # type: ignore[attr-defined]


def move_to_main(parameter: Tensor) -> None:
    """Add the gradient to the fp32 one, where the parameter has one."""
    main: Tensor | None = getattr(parameter, "main_grad", None)
    if main is not None and parameter.grad is not None:
        main.add_(parameter.grad)
        parameter.grad = None


class LossScale:
    """Dynamic loss scale of fp16, kept and updated on the device; one elsewhere."""

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.active = precision.compute == "float16"
        initial = precision.initial_loss_scale if self.active else 1.0
        self.value = torch.tensor(initial, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self.growth_steps = precision.loss_scale_growth_steps

    def update(self, overflowed: Tensor) -> None:
        """Halve after an overflow, double after enough good steps; no host read."""
        if self.active:
            torch._amp_update_scale_(
                self.value, self.good_steps, overflowed.float(), 2.0, 0.5, self.growth_steps
            )
