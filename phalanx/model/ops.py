"""The memory-bound steps of the transformer: Triton kernels on CUDA, plain torch elsewhere."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Asking the CUDA runtime here would forbid the launcher to fork; the build says enough.
HAS_KERNELS = torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
if HAS_KERNELS or TYPE_CHECKING:
    from phalanx.model.cuda import cublaslt as cublaslt
    from phalanx.model.cuda import kernels as kernels

NARROW_GROUP = 16  # of gates: the kernels take multiples of it
_CLAMP, _GATE_GAIN = 7.0, 1.702  # of gpt-oss
_NARROW = 512  # norms of fewer columns (those of a head) are left to torch


def matmul(a: Tensor, b: Tensor, *, turn_a: bool = False, turn_b: bool = False) -> Tensor:
    """op(a) @ op(b) of matrices; op transposes where the flag is set."""
    if HAS_KERNELS and cublaslt.applies(a, b, *cublaslt.shape_of(a, b, turn_a, turn_b)):
        product: Tensor = cublaslt.matmul(a, b, turn_a, turn_b)
        return product
    return (a.t() if turn_a else a) @ (b.t() if turn_b else b)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T for x: [..., inputs] and weight: [outputs, inputs]."""
    if not (HAS_KERNELS and x.is_cuda and x.dtype == weight.dtype == torch.bfloat16):
        return F.linear(x, weight)
    flat: Tensor = _MatmulFunction.apply(x.flatten(0, -2).contiguous(), weight)  # type: ignore[no-untyped-call]
    return flat.view(*x.shape[:-1], -1)


class _MatmulFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return matmul(x, weight, turn_b=True)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        slope = slope.contiguous()
        of_x = matmul(slope, weight) if ctx.needs_input_grad[0] else None
        of_weight = matmul(slope, x, turn_a=True) if ctx.needs_input_grad[1] else None
        return of_x, of_weight


def add_rms_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(x + branch, its root-mean-square norm times weight), the norm computed in fp32."""
    if HAS_KERNELS and x.is_cuda and x.shape[-1] >= _NARROW:
        return _AddRmsNorm.apply(x, branch, weight, eps)  # type: ignore[no-any-return, no-untyped-call]
    if branch is not None:
        x = x + branch
    return x, F.rms_norm(x, weight.shape, weight, eps)


class _AddRmsNorm(torch.autograd.Function):
    """Returns x too: the gradient of the residual path is then added inside one kernel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        added = None if branch is None else branch.contiguous()
        total, out, rstd = kernels.norm_forward(x, added, weight, eps)
        if branch is None:
            total = x
        ctx.save_for_backward(total, weight, rstd)
        ctx.joined = branch is not None
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    def backward(ctx: Any, residual: Tensor | None, slope: Tensor | None) -> tuple[Any, ...]:
        x, weight, rstd = ctx.saved_tensors
        if slope is None:
            return residual, residual if ctx.joined else None, None, None
        residual = None if residual is None else residual.contiguous()
        grad, weight_grad = kernels.norm_backward(slope.contiguous(), residual, x, weight, rstd)
        return grad, grad if ctx.joined else None, weight_grad, None


def swiglu(pairs: Tensor, width: int) -> Tensor:
    """silu(gate) * up; gates and ups lie in alternating groups of ``width`` columns."""
    if HAS_KERNELS and pairs.is_cuda and width % NARROW_GROUP == 0:
        return _SwiGLU.apply(pairs, width)  # type: ignore[no-any-return, no-untyped-call]
    gate, up = pairs.unflatten(-1, (-1, 2, width)).unbind(-2)
    hidden: Tensor = F.silu(gate) * up
    return hidden.flatten(-2)


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The gate of gpt-oss: both halves limited, SiLU with a gain, and one added to ups."""
    gate, up = gate.clamp(max=_CLAMP), up.clamp(-_CLAMP, _CLAMP)
    return gate * torch.sigmoid(_GATE_GAIN * gate) * (up + 1)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pairs: Tensor, width: int) -> Tensor:
        pairs = pairs.contiguous()
        ctx.save_for_backward(pairs)
        ctx.width = width
        hidden: Tensor = kernels.swiglu_forward(pairs, width)
        return hidden

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Any, ...]:
        (pairs,) = ctx.saved_tensors
        return kernels.swiglu_backward(slope.contiguous(), pairs, ctx.width), None


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Values squashed into (-cap, cap)."""
    return torch.tanh(x / cap) * cap


def split_rope(
    packed: Tensor, cos: Tensor, sin: Tensor, queries: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed heads [batch, seq, rows] -> q, k, v [batch, seq, heads, head_dim]; q, k rotated."""
    if HAS_KERNELS and packed.is_cuda and head_dim & (head_dim - 1) == 0:
        return _SplitRope.apply(packed, cos, sin, queries, head_dim)  # type: ignore[no-any-return, no-untyped-call]
    q, k, v = split_heads(packed, queries, head_dim)
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v


class _SplitRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, cos: Tensor, sin: Tensor, queries: int, head_dim: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        heads: tuple[Tensor, Tensor, Tensor] = kernels.rope_split(
            packed.contiguous(), cos, sin, queries, head_dim
        )
        return heads

    @staticmethod
    def backward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        packed = kernels.rope_merge(q.contiguous(), k.contiguous(), v.contiguous(), cos, sin)
        return packed, None, None, None, None


def split_heads(packed: Tensor, queries: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packed heads [batch, seq, rows] -> q, k, v [batch, seq, heads, head_dim]."""
    heads = packed.unflatten(-1, (-1, queries + 2, head_dim))
    q, k, v = heads.split((queries, 1, 1), dim=-2)
    return q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x: [batch, seq, heads, rotated]; the two halves of a head form the pairs."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
