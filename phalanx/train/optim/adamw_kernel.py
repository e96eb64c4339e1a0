"""The Triton kernel behind `fused_adamw`: 28 bytes of traffic a parameter with bf16 weights."""

# Triton's decorator and its pointer arguments have no types.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _adamw(
    weight_ptr, master_ptr, first_ptr, second_ptr, grad_ptr, step_ptr, multiplier_ptr, skip_ptr,
    size, learning_rate, rise1, rise2, log_beta1, log_beta2, eps, kept,
    HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(skip_ptr) != 0:
        return
    # In fp64: 1 - beta**step is a difference of nearly equal numbers in the first steps.
    step = tl.load(step_ptr).to(tl.float64)
    correction1 = (1.0 - tl.exp(step * log_beta1)).to(tl.float32)
    correction2 = (1.0 - tl.exp(step * log_beta2)).to(tl.float32)
    multiplier = tl.load(multiplier_ptr).to(tl.float32)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    grad = tl.load(grad_ptr + index, mask=inside).to(tl.float32) * multiplier
    first = tl.load(first_ptr + index, mask=inside)
    second = tl.load(second_ptr + index, mask=inside)
    master = tl.load(master_ptr + index, mask=inside)
    first += (grad - first) * rise1
    second += (grad * grad - second) * rise2
    root = tl.sqrt(second) / tl.sqrt(correction2) + eps
    master = master * kept - (learning_rate / correction1) * (first / root)
    tl.store(first_ptr + index, first, mask=inside)
    tl.store(second_ptr + index, second, mask=inside)
    tl.store(master_ptr + index, master, mask=inside)
    if HAS_WEIGHT:
        tl.store(weight_ptr + index, master, mask=inside)


def launch(
    weight: Tensor | None,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    learning_rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: Tensor,
    multiplier: Tensor,
    skip: Tensor,
) -> None:
    """Update one parameter. All tensors but the scalars have the same size and are contiguous."""
    size = master.numel()
    if size == 0:
        return
    for tensor in (weight, master, exp_avg, exp_avg_sq, grad):
        assert tensor is None or (tensor.is_contiguous() and tensor.numel() == size)
    _adamw[(triton.cdiv(size, _BLOCK),)](
        master if weight is None else weight, master, exp_avg, exp_avg_sq, grad,
        step, multiplier, skip, size, learning_rate, 1 - beta1, 1 - beta2,
        math.log(beta1) if beta1 else -math.inf, math.log(beta2) if beta2 else -math.inf,
        eps, 1 - learning_rate * weight_decay,
        HAS_WEIGHT=weight is not None, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
