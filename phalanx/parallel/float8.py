"""Linear layers of a block in fp8: e4m3 forward, e5m2 gradients, one scale a tensor.

Nothing is remembered from step to step: every scale follows from the tensors at hand, so
resuming, recomputing and accumulating need no care. Weights, outputs and weight gradients
keep their own format; embedding, attention and head are left alone.

Inputs are scaled by their exact maximum or, after a norm, by the largest value a norm can
give. Gradients are scaled by the maximum over some rows, with room for larger ones: e5m2 spans
2^31, so room costs nothing, and what exceeds even that is clipped.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from phalanx.model import Block, ForwardContext
from phalanx.model import ops as model_ops
from phalanx.model.attention import GroupedQueryAttention
from phalanx.model.layers import Linear, RMSNorm, SwiGLU

HAS_KERNELS = torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
if HAS_KERNELS or TYPE_CHECKING:
    from phalanx.model.cuda import cublaslt
    from phalanx.parallel import float8_kernels

FORWARD = torch.float8_e4m3fn
BACKWARD = torch.float8_e5m2
SAMPLE_EVERY = 16  # rows of a gradient between two that are looked at
SAMPLE_MARGIN = 64.0  # times the largest value seen that still fits


class Quantized(NamedTuple):
    """A matrix in fp8. Matmuls need the summed axis last, hence two orders."""

    rows: Tensor  # [m, n]; empty if not asked for
    columns: Tensor  # [n, m], the transpose, contiguous; empty if not asked for
    scale: Tensor  # []: what the stored values are multiplied by


def measure(x: Tensor, every: int = 1) -> Tensor:
    """Magnitudes whose largest is that of every ``every``-th row of x [m, n]."""
    if HAS_KERNELS and x.is_cuda:
        peaks: Tensor = float8_kernels.measure(x, every)
        return peaks
    return x[::every].abs().amax().float()


def quantize(
    x: Tensor, peaks: Tensor, dtype: torch.dtype, margin: float = 1.0,
    *, rows: bool = False, columns: bool = False,
) -> Quantized:  # fmt: skip
    """x [m, n] scaled so that ``margin`` times the largest of ``peaks`` fits."""
    if HAS_KERNELS and x.is_cuda:
        return Quantized(*float8_kernels.quantize(x, peaks, dtype, margin, rows, columns))
    return _quantize(x, peaks.max() * margin, dtype)


def _quantize(x: Tensor, peak: Tensor, dtype: torch.dtype) -> Quantized:
    """Plain torch form of the kernels' common end."""
    largest = torch.finfo(dtype).max
    scale = torch.exp2(torch.floor(torch.log2(largest / peak.clamp(min=1e-30))))
    rows = (x.float() * scale).clamp(-largest, largest).bfloat16().to(dtype)
    return Quantized(rows, rows.t().contiguous(), 1.0 / scale)


def quantize_gradient(slope: Tensor) -> Quantized:
    """A gradient [m, n] in e5m2, in both orders."""
    peaks = measure(slope, SAMPLE_EVERY)
    return quantize(slope, peaks, BACKWARD, SAMPLE_MARGIN, rows=True, columns=True)


def join_statistics(x: Tensor, branch: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(x + branch, 1 / rms of each row) of x [m, n]."""
    if HAS_KERNELS and x.is_cuda:
        total, rstd = float8_kernels.join_statistics(x, branch, eps)
        return (x if branch is None else total), rstd
    total = x if branch is None else x + branch
    return total, torch.rsqrt(total.float().square().mean(-1) + eps)


def norm_quantize(
    x: Tensor, rstd: Tensor, weight: Tensor, *, rows: bool = False, columns: bool = False
) -> Quantized:
    """The norm of x [m, n] in fp8."""
    if HAS_KERNELS and x.is_cuda:
        return Quantized(*float8_kernels.norm_quantize(x, rstd, weight, FORWARD, rows, columns))
    bound = x.shape[-1] ** 0.5 * weight.abs().amax().float()
    return _quantize(x.float() * rstd[:, None] * weight.float(), bound, FORWARD)


def norm_backward(
    slope: Tensor, residual: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x [m, n], with what reached it by the residual path, and of the weight."""
    if HAS_KERNELS and x.is_cuda:
        grads: tuple[Tensor, Tensor] = model_ops.kernels.norm_backward(
            slope, residual, x, weight, rstd
        )
        return grads
    normed = x.float() * rstd[:, None]
    weight_grad = (slope.float() * normed).sum(0).to(weight.dtype)
    scaled = slope.float() * weight.float()
    inner = (scaled * normed).mean(-1, keepdim=True)
    grad = rstd[:, None] * (scaled - normed * inner)
    if residual is not None:
        grad = grad + residual.float()
    return grad.to(x.dtype), weight_grad


def swiglu_backward(
    slope: Tensor, pairs: Tensor, hidden_peaks: Tensor, group_width: int
) -> tuple[Quantized, Quantized]:
    """The gradient of the pairs, and the hidden values again (columns), both in fp8."""
    if HAS_KERNELS and pairs.is_cuda and group_width % model_ops.NARROW_GROUP == 0:
        rows, columns, scale, hidden, hidden_scale = float8_kernels.swiglu_backward_quantize(
            slope, pairs, hidden_peaks, group_width, BACKWARD, FORWARD, SAMPLE_EVERY, SAMPLE_MARGIN
        )
        return Quantized(rows, columns, scale), Quantized(hidden, hidden, hidden_scale)
    gate, up = pairs.float().unflatten(-1, (-1, 2, group_width)).unbind(-2)
    wide = slope.float().unflatten(-1, (-1, group_width))
    sigmoid = gate.sigmoid()
    of_gate = wide * up * sigmoid * (1 + gate * (1 - sigmoid))
    of_pairs = torch.stack((of_gate, wide * gate * sigmoid), -2).flatten(1)
    hidden = quantize(model_ops.swiglu(pairs, group_width), hidden_peaks, FORWARD)
    return quantize_gradient(of_pairs), hidden


def multiply(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """a [m, k] times the transpose of b [n, k]. fast: sum in the tensor cores' short format."""
    if HAS_KERNELS and a.is_cuda:
        if dtype == torch.bfloat16 and cublaslt.applies(a, b, a.shape[0], b.shape[0], a.shape[1]):
            product: Tensor = cublaslt.matmul_fp8(a, a_scale, b, b_scale, fast)
            return product
        return torch._scaled_mm(
            a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=fast
        )
    return ((a.float() * a_scale) @ (b.float() * b_scale).t()).to(dtype)


def forward_matmul(x: Quantized, weight: Tensor, peaks: Tensor, dtype: torch.dtype) -> Tensor:
    """x @ weight.T"""
    w = quantize(weight, peaks, FORWARD, rows=True)
    return multiply(x.rows, x.scale, w.rows, w.scale, dtype, fast=True)


def input_gradient(slope: Quantized, weight: Tensor, peaks: Tensor, dtype: torch.dtype) -> Tensor:
    """slope @ weight"""
    w = quantize(weight, peaks, FORWARD, columns=True)
    return multiply(slope.rows, slope.scale, w.columns, w.scale, dtype, fast=False)


def weight_gradient(slope: Quantized, x: Quantized, dtype: torch.dtype) -> Tensor:
    """slope.T @ x"""
    return multiply(slope.columns, slope.scale, x.columns, x.scale, dtype, fast=False)


class _Float8Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        peaks, weight_peaks = measure(x), measure(weight)
        ctx.save_for_backward(x, peaks, weight, weight_peaks)
        q = quantize(x, peaks, FORWARD, rows=True)
        return forward_matmul(q, weight, weight_peaks, x.dtype)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Any, ...]:
        x, peaks, weight, weight_peaks = ctx.saved_tensors
        g = quantize_gradient(slope.contiguous())
        of_weight = weight_gradient(g, quantize(x, peaks, FORWARD, columns=True), weight.dtype)
        return input_gradient(g, weight, weight_peaks, x.dtype), of_weight


class _NormLinear(torch.autograd.Function):
    """(x, linear(norm(x))): the normed values exist in fp8 only."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        _, rstd = join_statistics(x, None, eps)
        peaks = measure(weight)
        ctx.save_for_backward(x, rstd, norm_weight, weight, peaks)
        n = norm_quantize(x, rstd, norm_weight, rows=True)
        return x, forward_matmul(n, weight, peaks, x.dtype)

    @staticmethod
    def backward(ctx: Any, residual: Tensor, slope: Tensor) -> tuple[Any, ...]:
        x, rstd, norm_weight, weight, peaks = ctx.saved_tensors
        g = quantize_gradient(slope.contiguous())
        n = norm_quantize(x, rstd, norm_weight, columns=True)
        of_weight = weight_gradient(g, n, weight.dtype)
        of_normed = input_gradient(g, weight, peaks, x.dtype)
        grad, of_norm = norm_backward(of_normed, residual.contiguous(), x, norm_weight, rstd)
        return grad, of_norm, None, of_weight


class _NormMlp(torch.autograd.Function):
    """(x + branch, mlp(norm(x + branch))): what runs between its matmuls is fp8 already."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, norm_weight: Tensor, eps: float,
        gate_up: Tensor, down: Tensor, group_width: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        total, rstd = join_statistics(x, branch, eps)
        pair_peaks, down_peaks = measure(gate_up), measure(down)
        n = norm_quantize(total, rstd, norm_weight, rows=True)
        pairs = forward_matmul(n, gate_up, pair_peaks, x.dtype)
        hidden = model_ops.swiglu(pairs, group_width)
        hidden_peaks = measure(hidden)
        h = quantize(hidden, hidden_peaks, FORWARD, rows=True)
        ctx.save_for_backward(
            total, rstd, norm_weight, pairs, hidden_peaks, gate_up, pair_peaks, down, down_peaks
        )
        ctx.group_width = group_width
        return total, forward_matmul(h, down, down_peaks, x.dtype)

    @staticmethod
    def backward(ctx: Any, residual: Tensor, slope: Tensor) -> tuple[Any, ...]:
        (
            total, rstd, norm_weight, pairs, hidden_peaks, gate_up, pair_peaks, down, down_peaks
        ) = ctx.saved_tensors  # fmt: skip
        g = quantize_gradient(slope.contiguous())
        of_hidden = input_gradient(g, down, down_peaks, slope.dtype)
        p, h = swiglu_backward(of_hidden, pairs, hidden_peaks, ctx.group_width)
        of_down = weight_gradient(g, h, down.dtype)
        of_normed = input_gradient(p, gate_up, pair_peaks, slope.dtype)
        n = norm_quantize(total, rstd, norm_weight, columns=True)
        of_pair = weight_gradient(p, n, gate_up.dtype)
        grad, of_norm = norm_backward(of_normed, residual.contiguous(), total, norm_weight, rstd)
        return grad, grad, of_norm, None, of_pair, of_down, None


class Float8Linear(Linear):
    """A linear layer without bias whose three matmuls run in fp8."""

    def forward(self, x: Tensor) -> Tensor:
        flat: Tensor = _Float8Function.apply(x.flatten(0, -2).contiguous(), self.weight)  # type: ignore[no-untyped-call]
        return flat.view(*x.shape[:-1], -1)


class Float8Block(Block):
    """A dense block that hands fp8 values from norm and SwiGLU straight to the matmuls."""

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        if not self._is_whole():
            return super().forward(x, context)
        attention, mlp = cast(GroupedQueryAttention, self.attention), cast(SwiGLU, self.mlp)
        shape, x = x.shape, x.flatten(0, -2).contiguous()
        x, packed = self._norm_linear(x, self.attention_norm, attention.qkv)
        attended = attention.attend(packed.view(*shape[:-1], -1), context)
        x, mixed = _NormMlp.apply(  # type: ignore[no-untyped-call]
            x, attended.flatten(0, -2), self.mlp_norm.weight, self.mlp_norm.eps,
            mlp.gate_up.weight, mlp.down.weight, mlp.group_width,
        )  # fmt: skip
        # Views are added, not the sum viewed: a pipeline stage must be able to detach it.
        out: Tensor = x.view(shape) + mixed.view(shape)
        return out

    def _is_whole(self) -> bool:
        """Whether attention and mlp may be opened: nothing is attached around them."""
        branches = (self.attention, self.mlp)
        return not any(b._forward_pre_hooks or b._forward_hooks for b in branches if b is not None)

    @staticmethod
    def _norm_linear(x: Tensor, norm: RMSNorm, linear: nn.Linear) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = _NormLinear.apply(x, norm.weight, norm.eps, linear.weight)  # type: ignore[no-untyped-call]
        return out


def apply_float8(block: nn.Module) -> None:
    """Make the linear layers of a block multiply in fp8. Parameters keep their names."""
    for module in block.modules():
        if type(module) is Linear and _fits(module):
            module.__class__ = Float8Linear
    if type(block) is Block and isinstance(block.attention, GroupedQueryAttention):
        plain = block.attention.q_norm is None and isinstance(block.mlp, SwiGLU)
        linears = [m for m in block.modules() if isinstance(m, nn.Linear)]
        if plain and all(isinstance(m, Float8Linear) for m in linears):
            block.__class__ = Float8Block


def _fits(linear: nn.Linear) -> bool:
    """fp8 matmuls want multiples of 16 on every side."""
    return linear.in_features % 16 == 0 and linear.out_features % 16 == 0
