"""Triton kernels of the transformer's memory-bound steps, as torch custom operators.

Imported on CUDA builds only; `phalanx.model.ops` holds the plain torch form of each. Every
kernel is deterministic: sums over tokens go through per-program partial results, not atomics.
"""

# Triton's decorator and its pointer arguments have no types.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

_BACKWARD_PROGRAMS_PER_PROCESSOR = 2
_SWIGLU_TILE = 4096  # elements of the hidden layer handled by one program
_ROPE_TOKENS = 32  # tokens handled by one program
_LOSS_TILE = 2048  # logits handled at once by one program
_LOSS_WARPS = 8


@functools.cache
def _processors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


# ---------------------------------------------------------------- norm with residual


@triton.jit
def _norm_forward(
    x_ptr, branch_ptr, weight_ptr, sum_ptr, out_ptr, rstd_ptr,
    width, eps, HAS_BRANCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        x += tl.load(branch_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, x * rstd * weight, mask=inside)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def _norm_backward(
    slope_ptr, residual_ptr, x_ptr, weight_ptr, rstd_ptr, grad_ptr, partial_ptr,
    rows, width, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    weight_grad = tl.zeros([BLOCK], tl.float32)
    # Three stages: the next rows are under way while this one is summed.
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=3):
        offset = row * width.to(tl.int64) + column
        slope = tl.load(slope_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normed = x * rstd
        weight_grad += slope * normed
        slope *= weight
        grad = rstd * (slope - normed * (tl.sum(slope * normed, 0) / width))
        if HAS_RESIDUAL:
            grad += residual
        tl.store(grad_ptr + offset, grad, mask=inside)
    tl.store(partial_ptr + tl.program_id(0) * width + column, weight_grad, mask=inside)


def _norm_warps(block: int) -> int:
    return max(1, min(16, block // 512))


@torch.library.custom_op("phalanx::norm_forward", mutates_args=(), device_types="cuda")
def norm_forward(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(x + branch, its norm times weight, 1 / rms). Without a branch the sum is empty."""
    width = x.shape[-1]
    rows = x.numel() // width
    total = torch.empty_like(x) if branch is not None else x.new_empty(0)
    out = torch.empty_like(x)
    rstd = x.new_empty(rows, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    _norm_forward[(rows,)](
        x, x if branch is None else branch, weight, total, out, rstd,
        width, eps, HAS_BRANCH=branch is not None, BLOCK=block, num_warps=_norm_warps(block),
    )  # fmt: skip
    return total, out, rstd


@norm_forward.register_fake
def _(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = torch.empty_like(x) if branch is not None else x.new_empty(0)
    rstd = x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
    return total, torch.empty_like(x), rstd


@torch.library.custom_op("phalanx::norm_backward", mutates_args=(), device_types="cuda")
def norm_backward(
    slope: Tensor, residual: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x (plus ``residual``, what reached x by the other path) and of the weight."""
    width = x.shape[-1]
    rows = x.numel() // width
    programs = min(rows, _processors(x.device.index) * _BACKWARD_PROGRAMS_PER_PROCESSOR)
    grad = torch.empty_like(x)
    partial = x.new_empty((programs, width), dtype=torch.float32)
    block = triton.next_power_of_2(width)
    _norm_backward[(programs,)](
        slope, slope if residual is None else residual, x, weight, rstd, grad, partial,
        rows, width, HAS_RESIDUAL=residual is not None, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return grad, partial.sum(0).to(weight.dtype)


@norm_backward.register_fake
def _(
    slope: Tensor, residual: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


# ---------------------------------------------------------------- SwiGLU


# A group of gates or ups need not be a power of two wide: it is handled in blocks that are. Block
# ``unit`` of the hidden values stands at unit * BLOCK there, and in the pairs behind as many ups as
# there are groups before its own.


@triton.jit
def _swiglu_forward(
    pairs_ptr, out_ptr, units,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)[:, None]
    inside = unit < units
    place = unit * BLOCK + tl.arange(0, BLOCK)[None, :]
    source = pairs_ptr + place + unit // (WIDTH // BLOCK) * WIDTH
    gate = tl.load(source, mask=inside).to(tl.float32)
    up = tl.load(source + WIDTH, mask=inside).to(tl.float32)
    tl.store(out_ptr + place, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _swiglu_backward(
    slope_ptr, pairs_ptr, grad_ptr, units,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)[:, None]
    inside = unit < units
    place = unit * BLOCK + tl.arange(0, BLOCK)[None, :]
    pair = place + unit // (WIDTH // BLOCK) * WIDTH
    gate = tl.load(pairs_ptr + pair, mask=inside).to(tl.float32)
    up = tl.load(pairs_ptr + pair + WIDTH, mask=inside).to(tl.float32)
    slope = tl.load(slope_ptr + place, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    tl.store(grad_ptr + pair, slope * up * (sigmoid + silu * (1.0 - sigmoid)), mask=inside)
    tl.store(grad_ptr + pair + WIDTH, slope * silu, mask=inside)


def swiglu_block(width: int) -> int:
    """The largest power of two, up to 128, that divides a group of gates."""
    return min(width & -width, 128)


def _swiglu_tiles(hidden: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    block = swiglu_block(width)
    units, tile_units = hidden // block, _SWIGLU_TILE // block
    sizes = {"units": units, "WIDTH": width, "BLOCK": block, "UNITS": tile_units}
    return (triton.cdiv(units, tile_units),), sizes


@torch.library.custom_op("phalanx::swiglu_forward", mutates_args=(), device_types="cuda")
def swiglu_forward(pairs: Tensor, width: int) -> Tensor:
    """silu(gate) * up of [..., groups * 2 * width] with gates and ups in alternating groups."""
    out = pairs.new_empty((*pairs.shape[:-1], pairs.shape[-1] // 2))
    grid, sizes = _swiglu_tiles(out.numel(), width)
    _swiglu_forward[grid](pairs, out, **sizes, num_warps=8)
    return out


@swiglu_forward.register_fake
def _(pairs: Tensor, width: int) -> Tensor:
    return pairs.new_empty((*pairs.shape[:-1], pairs.shape[-1] // 2))


@torch.library.custom_op("phalanx::swiglu_backward", mutates_args=(), device_types="cuda")
def swiglu_backward(slope: Tensor, pairs: Tensor, width: int) -> Tensor:
    """Gradient of the pairs."""
    grad = torch.empty_like(pairs)
    grid, sizes = _swiglu_tiles(slope.numel(), width)
    _swiglu_backward[grid](slope, pairs, grad, **sizes, num_warps=8)
    return grad


@swiglu_backward.register_fake
def _(slope: Tensor, pairs: Tensor, width: int) -> Tensor:
    return torch.empty_like(pairs)


# ---------------------------------------------------------------- rotary positions


@triton.jit
def _rope_packed(
    packed_ptr, q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, tokens, sequence, kv_heads,
    MERGE: tl.constexpr, QUERIES: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Packed heads to rotated q, k and plain v; MERGE: the way back, with the inverse turn."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    group = tl.program_id(1)
    column = tl.arange(0, HALF)[None, :]
    inside = token < tokens
    angle = (token % sequence) * HALF + column
    cos = tl.load(cos_ptr + angle, mask=inside)
    sin = tl.load(sin_ptr + angle, mask=inside)
    if MERGE:
        sin = -sin
    token = token.to(tl.int64)
    packed = packed_ptr + (token * kv_heads + group) * ((QUERIES + 2) * 2 * HALF) + column
    for slot in tl.static_range(QUERIES + 2):
        if slot < QUERIES:
            head = q_ptr + ((token * kv_heads + group) * QUERIES + slot) * (2 * HALF) + column
        elif slot == QUERIES:
            head = k_ptr + (token * kv_heads + group) * (2 * HALF) + column
        else:
            head = v_ptr + (token * kv_heads + group) * (2 * HALF) + column
        source = head if MERGE else packed + slot * (2 * HALF)
        target = packed + slot * (2 * HALF) if MERGE else head
        first = tl.load(source, mask=inside)
        second = tl.load(source + HALF, mask=inside)
        if slot <= QUERIES:
            a, b = first.to(tl.float32), second.to(tl.float32)
            tl.store(target, a * cos - b * sin, mask=inside)
            tl.store(target + HALF, b * cos + a * sin, mask=inside)
        else:
            tl.store(target, first, mask=inside)
            tl.store(target + HALF, second, mask=inside)


def _rope(
    packed: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, merge: bool
) -> None:
    tokens, kv_heads = k.shape[0] * k.shape[1], k.shape[2]
    _rope_packed[(triton.cdiv(tokens, _ROPE_TOKENS), kv_heads)](
        packed, q, k, v, cos, sin, tokens, k.shape[1], kv_heads, MERGE=merge,
        QUERIES=q.shape[2] // kv_heads, HALF=q.shape[3] // 2, TOKENS=_ROPE_TOKENS, num_warps=4,
    )  # fmt: skip


@torch.library.custom_op("phalanx::rope_split", mutates_args=(), device_types="cuda")
def rope_split(
    packed: Tensor, cos: Tensor, sin: Tensor, queries: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """[batch, seq, kv_heads * (queries + 2) * head_dim] -> rotated q, k and v."""
    q, k, v = _split_like(packed, queries, head_dim)
    _rope(packed, q, k, v, cos, sin, merge=False)
    return q, k, v


@rope_split.register_fake
def _(
    packed: Tensor, cos: Tensor, sin: Tensor, queries: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _split_like(packed, queries, head_dim)


def _split_like(packed: Tensor, queries: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, sequence, rows = packed.shape
    kv_heads = rows // ((queries + 2) * head_dim)
    return (
        packed.new_empty(batch, sequence, kv_heads * queries, head_dim),
        packed.new_empty(batch, sequence, kv_heads, head_dim),
        packed.new_empty(batch, sequence, kv_heads, head_dim),
    )


@torch.library.custom_op("phalanx::rope_merge", mutates_args=(), device_types="cuda")
def rope_merge(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradient of the packed heads from those of rotated q, k and v."""
    packed = _merge_like(q, k, v)
    _rope(packed, q, k, v, cos, sin, merge=True)
    return packed


@rope_merge.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _merge_like(q, k, v)


def _merge_like(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = q.shape[2] + k.shape[2] + v.shape[2]
    return q.new_empty(q.shape[0], q.shape[1], heads * q.shape[3])


# ---------------------------------------------------------------- cross-entropy


@triton.jit
def _cross_entropy(
    logits_ptr, labels_ptr, scale_ptr, peak_ptr, sum_ptr, target_ptr, vocab, first,
    STATISTICS: tl.constexpr, GRADIENT: tl.constexpr, Z_LOSS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row. STATISTICS: write its largest logit, sum of exp(logit - largest) and the logit of
    its label (0 when another slice has it). GRADIENT: overwrite the logits by their gradient, with
    that of Z_LOSS times the square of their log-sum-exp.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab
    label = tl.load(labels_ptr + row)
    local = label - first
    if STATISTICS:
        # A running maximum and sum per lane; one exponential serves either case of the update.
        lane_peak = tl.full([BLOCK], -1e30, tl.float32)
        lane_sum = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            column = start + tl.arange(0, BLOCK)
            value = tl.load(
                logits_ptr + column, mask=column < vocab, other=-1e30, eviction_policy="evict_last"
            ).to(tl.float32)
            rise = value - lane_peak
            smaller = tl.exp(-tl.abs(rise))
            lane_sum = tl.where(rise > 0, lane_sum * smaller + 1.0, lane_sum + smaller)
            lane_peak = tl.maximum(lane_peak, value)
        peak = tl.max(lane_peak, 0)
        total = tl.sum(lane_sum * tl.exp(lane_peak - peak), 0)
        here = (local >= 0) & (local < vocab)
        target = tl.load(logits_ptr + local, mask=here, other=0.0).to(tl.float32)
        tl.store(peak_ptr + row, peak)
        tl.store(sum_ptr + row, total)
        tl.store(target_ptr + row, target)
    else:
        peak = tl.load(peak_ptr + row)
        total = tl.load(sum_ptr + row)
    if GRADIENT:
        scale = tl.where(label >= 0, tl.load(scale_ptr).to(tl.float32), 0.0)
        factor = scale / total
        if Z_LOSS > 0:
            factor *= 1.0 + 2.0 * Z_LOSS * (tl.log(total) + peak)
        # Every lane must have read the target before its place is overwritten.
        tl.debug_barrier()
        for start in range(0, vocab, BLOCK):
            column = start + tl.arange(0, BLOCK)
            value = tl.load(
                logits_ptr + column, mask=column < vocab, other=0.0, eviction_policy="evict_first"
            ).to(tl.float32)
            slope = tl.exp(value - peak) * factor - tl.where(column == local, scale, 0.0)
            tl.store(logits_ptr + column, slope, mask=column < vocab)


def cross_entropy_rows(
    logits: Tensor, labels: Tensor, scale: Tensor, statistics: Tensor, first: int,
    *, measure: bool, gradient: bool, z_loss: float = 0.0,
) -> None:  # fmt: skip
    """Work on each row of ``logits`` [rows, vocab] with one program.

    measure: fill ``statistics`` [3, rows] with peak, sum of exponentials, label's logit.
    gradient: use them to turn the logits into the gradient of the scaled loss, in place.
    """
    rows, vocab = logits.shape
    _cross_entropy[(rows,)](
        logits, labels, scale, statistics[0], statistics[1], statistics[2], vocab, first,
        STATISTICS=measure, GRADIENT=gradient, Z_LOSS=z_loss, BLOCK=_LOSS_TILE,
        num_warps=_LOSS_WARPS,
    )  # fmt: skip


@triton.jit
def _scale_unless_one(x_ptr, factor_ptr, size, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + index, mask=index < size).to(tl.float32)
        tl.store(x_ptr + index, x * factor, mask=index < size)


def scale_unless_one(x: Tensor, factor: Tensor) -> Tensor:
    """x * factor in place; reads and writes nothing when the factor, on the device, is one."""
    _scale_unless_one[(triton.cdiv(x.numel(), 8192),)](x, factor, x.numel(), BLOCK=8192)
    return x
