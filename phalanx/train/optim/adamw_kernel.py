"""The Triton kernel behind `fused_adamw`: 28 bytes of traffic a parameter with bf16 weights and
fp32 moments, 20 with bf16 ones and 16 with those of 8 bits (`moments.py` has their meaning)."""

# Triton's decorator and its pointer arguments have no types.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.config import STATE_BLOCK
from phalanx.train.optim.moments import FIRST_STEPS, SECOND_STEPS, Moments

_ELEMENTS = 2048  # of one program


@triton.jit
def _code(share, root, chance, STEPS: tl.constexpr, FOURTH: tl.constexpr):
    """The step below or above, so often that the mean is ``share``."""
    below = tl.minimum(tl.floor(root * STEPS), STEPS - 1.0)
    low = below / STEPS
    high = (below + 1.0) / STEPS
    low, high = low * low, high * high
    if FOURTH:
        low, high = low * low, high * high
    return below + (chance * (high - low) < share - low).to(tl.float32)


@triton.jit
def _adamw(
    weight_ptr, master_ptr, first_ptr, second_ptr, first_scale_ptr, second_scale_ptr, grad_ptr,
    step_ptr, multiplier_ptr, skip_ptr,
    size, start, salt, learning_rate, rise1, rise2, log_beta1, log_beta2, eps, kept,
    HAS_WEIGHT: tl.constexpr, IN_BLOCKS: tl.constexpr, IN_BF16: tl.constexpr,
    STEPS1: tl.constexpr, STEPS2: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    if tl.load(skip_ptr) != 0:
        return
    # In fp64: 1 - beta**step is a difference of nearly equal numbers in the first steps.
    step = tl.load(step_ptr).to(tl.float64)
    correction1 = (1.0 - tl.exp(step * log_beta1)).to(tl.float32)
    correction2 = (1.0 - tl.exp(step * log_beta2)).to(tl.float32)
    multiplier = tl.load(multiplier_ptr).to(tl.float32)
    begin = tl.program_id(0).to(tl.int64) * (ROWS * BLOCK)
    index = begin + (tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])
    inside = index < size
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = block * BLOCK < size
    grad = tl.load(grad_ptr + index, mask=inside, other=0.0).to(tl.float32) * multiplier
    first = tl.load(first_ptr + index, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(second_ptr + index, mask=inside, other=0.0).to(tl.float32)
    master = tl.load(master_ptr + index, mask=inside, other=0.0)
    if IN_BLOCKS:
        scale1 = tl.load(first_scale_ptr + block, mask=there, other=0.0)
        scale2 = tl.load(second_scale_ptr + block, mask=there, other=0.0)
        first = first / STEPS1
        first = first * tl.abs(first) * scale1[:, None]
        second = second / STEPS2
        second = second * second
        second = second * second * scale2[:, None]
    first += (grad - first) * rise1
    second += (grad * grad - second) * rise2
    root = tl.sqrt(second) / tl.sqrt(correction2) + eps
    master = master * kept - (learning_rate / correction1) * (first / root)
    tl.store(master_ptr + index, master, mask=inside)
    if HAS_WEIGHT:
        tl.store(weight_ptr + index, master, mask=inside)
    if IN_BLOCKS or IN_BF16:
        seed = salt + step.to(tl.int32) * 1000003
        chance1, chance2, _, _ = tl.rand4x(seed, (start + index).to(tl.int32))
    if IN_BF16:
        bits1 = first.to(tl.int32, bitcast=True) + (chance1 * 65536.0).to(tl.int32)
        bits2 = second.to(tl.int32, bitcast=True) + (chance2 * 65536.0).to(tl.int32)
        first = (bits1 & -65536).to(tl.float32, bitcast=True)
        second = (bits2 & -65536).to(tl.float32, bitcast=True)
    if IN_BLOCKS:
        scale1 = tl.max(tl.abs(first), axis=1)
        scale2 = tl.max(second, axis=1)
        tl.store(first_scale_ptr + block, scale1, mask=there)
        tl.store(second_scale_ptr + block, scale2, mask=there)
        share = tl.abs(first) / tl.where(scale1 > 0, scale1, 1.0)[:, None]
        code = _code(share, tl.sqrt(share), chance1, STEPS1, FOURTH=False)
        first = tl.where(first < 0, -code, code)
        share = second / tl.where(scale2 > 0, scale2, 1.0)[:, None]
        code = _code(share, tl.sqrt(tl.sqrt(share)), chance2, STEPS2, FOURTH=True)
        second = tl.where(share > 0, tl.maximum(code, 1.0), 0.0)
    tl.store(first_ptr + index, first.to(first_ptr.dtype.element_ty), mask=inside)
    tl.store(second_ptr + index, second.to(second_ptr.dtype.element_ty), mask=inside)


def launch(
    weight: Tensor | None,
    master: Tensor,
    moments: Moments,
    grad: Tensor,
    learning_rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: Tensor,
    multiplier: Tensor,
    skip: Tensor,
    salt: int,
    start: int,
) -> None:
    """Update one parameter. All tensors but the scalars have the same size and are contiguous."""
    size = master.numel()
    if size == 0:
        return
    for tensor in (weight, master, moments.first, moments.second, grad):
        assert tensor is None or (tensor.is_contiguous() and tensor.numel() == size)
    for tensor in moments.stored[2:]:
        assert tensor.is_contiguous() and tensor.numel() * STATE_BLOCK == size
    scales = moments.stored[2:] or (master, master)  # without blocks nothing of them is touched
    _adamw[(triton.cdiv(size, _ELEMENTS),)](
        master if weight is None else weight, master, moments.first, moments.second, *scales, grad,
        step, multiplier, skip, size, start, salt & 0x3FFFFFFF,
        learning_rate, 1 - beta1, 1 - beta2,
        math.log(beta1) if beta1 else -math.inf, math.log(beta2) if beta2 else -math.inf,
        eps, 1 - learning_rate * weight_decay,
        HAS_WEIGHT=weight is not None, IN_BLOCKS=moments.in_blocks,
        IN_BF16=moments.first.dtype == torch.bfloat16,
        STEPS1=FIRST_STEPS, STEPS2=SECOND_STEPS,
        BLOCK=STATE_BLOCK, ROWS=_ELEMENTS // STATE_BLOCK, num_warps=8,
    )  # fmt: skip
