"""Causal attention on CUDA: FlashAttention 4 where it is installed, else what torch has.

On Hopper its kernels are faster than cuDNN's at both head sizes and every length that was measured
(docs/concepts/performance.md). They are compiled when a shape is first met, and kept on disk.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

FLASH_PACKAGE, FLASH_VERSION = "flash-attn-4", "4.0.0b36"  # its inner functions change
HEAD_SIZES = (64, 128)
SHORTEST = 1024  # tokens, below which what is compiled is not worth the wait

# cuDNN is the fastest of torch's on Hopper; flash is the deterministic one; others are fallbacks.
CUDA_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [batch, seq, heads, dim], k and v with as many heads or fewer -> as q."""
    if flash_applies(q, v):
        out: Tensor = flash_forward(q, k, v, scale)[0]
        return out
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    deterministic = torch.are_deterministic_algorithms_enabled()
    with sdpa_kernel(CUDA_BACKENDS[1:] if deterministic else CUDA_BACKENDS, set_priority=True):
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
        )
    return out.transpose(1, 2)


def flash_applies(q: Tensor, v: Tensor) -> bool:
    """Whether FlashAttention 4 is here, was measured for these, and bits need not repeat."""
    return (
        q.is_cuda
        and q.dtype == v.dtype == torch.bfloat16
        and q.shape[1] == v.shape[1] >= SHORTEST
        and q.shape[-1] == v.shape[-1]
        and q.shape[-1] in HEAD_SIZES
        and not torch.are_deterministic_algorithms_enabled()
        and _flash_runs_on(q.device.index)
    )


@functools.cache
def _flash_runs_on(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0) and flash_installed()


@functools.cache
def flash_installed() -> bool:
    """The version whose functions are called below."""
    try:
        return importlib.metadata.version(FLASH_PACKAGE) == FLASH_VERSION
    except importlib.metadata.PackageNotFoundError:
        return False


@functools.cache
def _flash() -> Any:
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    from flash_attn.cute import interface

    return interface


@torch.library.custom_op("phalanx::flash_forward", mutates_args=(), device_types="cuda")
def flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention and the log-sum-exp of its rows [batch, heads, seq]."""
    out, lse, *_ = _flash()._flash_attn_fwd(
        q, k, v, softmax_scale=scale, causal=True, return_lse=True
    )
    return out, lse


@flash_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    batch, sequence, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, sequence), dtype=torch.float32)


@torch.library.custom_op("phalanx::flash_backward", mutates_args=(), device_types="cuda")
def flash_backward(
    slope: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    dq, dk, dv = _flash()._flash_attn_bwd(q, k, v, out, slope, lse, scale, True)
    return dq, dk, dv


@flash_backward.register_fake
def _(
    slope: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float], output: Any) -> None:
    q, k, v, ctx.scale = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse)


def _slopes(ctx: Any, slope: Tensor, _of_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    return *flash_backward(slope.contiguous(), *ctx.saved_tensors, ctx.scale), None


flash_forward.register_autograd(_slopes, setup_context=_keep)
