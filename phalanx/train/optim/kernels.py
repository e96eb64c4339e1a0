"""The AdamW update in one pass over memory: a Triton kernel on CUDA, torch elsewhere."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phalanx.train.optim.moments import Moments, decode, encode

HAS_KERNELS = torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
if HAS_KERNELS or TYPE_CHECKING:
    from phalanx.train.optim import adamw_kernel

_GOLDEN = 0x9E3779B9  # spreads seeds of neighbouring updates


@torch.no_grad()
def fused_adamw(
    weight: Tensor | None,  # compute copy that receives the new values; None: master is it
    master: Tensor,  # fp32
    moments: Moments,
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
    salt: int = 0,  # of the chance by which moments are rounded
    start: int = 0,  # the first of these elements in its weight, likewise
) -> None:
    """One AdamW update in place; scalars that depend on the gradient stay on the device."""
    if HAS_KERNELS and master.is_cuda:
        adamw_kernel.launch(
            weight, master, moments, grad, learning_rate, beta1, beta2, eps,
            weight_decay, step, multiplier, skip, salt, start,
        )  # fmt: skip
        return
    scaled = grad.to(torch.float32) * multiplier
    exp_avg, exp_avg_sq = decode(moments)
    first = exp_avg.lerp(scaled, 1 - beta1)
    second = exp_avg_sq * beta2 + scaled * scaled * (1 - beta2)
    count = step.to(torch.float64)
    step_size = (learning_rate / (1 - beta1**count)).to(torch.float32)
    root = (1 - beta2**count).sqrt().to(torch.float32)
    update = first / (second.sqrt() / root + eps)
    new = master * (1 - learning_rate * weight_decay) - step_size * update
    exact = moments.first.dtype == torch.float32  # nothing is left to chance
    found = encode(moments, first, second, 0 if exact else salt + start + int(count) * _GOLDEN)
    for target, value in ((master, new), *zip(moments.stored, found.stored, strict=True)):
        target.copy_(torch.where(skip, target, value))
    if weight is not None:
        weight.copy_(torch.where(skip, weight, master.to(weight.dtype)))
