"""The AdamW update in one pass over memory: a Triton kernel on CUDA, torch elsewhere."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch
from torch import Tensor

HAS_KERNELS = torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
if HAS_KERNELS or TYPE_CHECKING:
    from phalanx.train.optim import adamw_kernel


@torch.no_grad()
def fused_adamw(
    weight: Tensor | None,  # compute copy that receives the new values; None: master is it
    master: Tensor,  # fp32
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    *,
    learning_rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: Tensor,  # [] float, the number of this update from 1
    multiplier: Tensor,  # [] what the gradient is multiplied by
    skip: Tensor,  # [] bool: write nothing
) -> None:
    """One AdamW update in place; scalars that depend on the gradient stay on the device."""
    if HAS_KERNELS and master.is_cuda:
        adamw_kernel.launch(
            weight, master, exp_avg, exp_avg_sq, grad, learning_rate, beta1, beta2, eps,
            weight_decay, step, multiplier, skip,
        )  # fmt: skip
        return
    scaled = grad.to(torch.float32) * multiplier
    first = exp_avg.lerp(scaled, 1 - beta1)
    second = exp_avg_sq * beta2 + scaled * scaled * (1 - beta2)
    count = step.to(torch.float64)
    step_size = (learning_rate / (1 - beta1**count)).to(torch.float32)
    root = (1 - beta2**count).sqrt().to(torch.float32)
    update = first / (second.sqrt() / root + eps)
    new = master * (1 - learning_rate * weight_decay) - step_size * update
    for target, value in ((master, new), (exp_avg, first), (exp_avg_sq, second)):
        target.copy_(torch.where(skip, target, value))
    if weight is not None:
        weight.copy_(torch.where(skip, weight, master.to(weight.dtype)))
