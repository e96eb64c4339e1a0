"""Triton kernels that make fp8 operands: each writes its result as rows and as columns.

Hopper multiplies fp8 only when both operands run along the summed axis, so forward and
backward need the same values in both orders. One pass over the source writes both. Scales
are powers of two: applying one rounds nothing.
"""

# Triton's decorator and its pointer arguments have no types.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.model.cuda.kernels import swiglu_block

PEAKS = 1024  # partial maxima that one measurement leaves
_ROWS = 64  # rows of a tile; as many bytes are contiguous in the transposed copy
_COLUMNS = 128
_SWIGLU_TILE = 4096  # elements


@triton.jit
def _power_of_two_scale(peak, LARGEST: tl.constexpr):
    """Largest power of two that keeps ``peak`` within the format."""
    return tl.exp2(tl.floor(tl.log2(LARGEST / tl.maximum(peak, 1e-30))))


@triton.jit
def _store(
    value, rows_ptr, columns_ptr, row, column, height, width, inside,
    WRITE_ROWS: tl.constexpr, WRITE_COLUMNS: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Store a tile at (row, column) of [height, width] and, transposed, of [width, height]."""
    # By way of bf16, in which the compiler then turns the tile: Triton 3.6 corrupts values of
    # 8 bits when it rearranges them between threads.
    value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST).to(tl.bfloat16).to(tl.float32)
    if WRITE_ROWS:
        target = rows_ptr + row[:, None] * width + column[None, :]
        tl.store(target, value.to(rows_ptr.dtype.element_ty), mask=inside)
    if WRITE_COLUMNS:
        target = columns_ptr + column[:, None].to(tl.int64) * height + row[None, :]
        turned = tl.trans(value.to(columns_ptr.dtype.element_ty))
        tl.store(target, turned, mask=tl.trans(inside))


@triton.jit
def _measure(x_ptr, peaks_ptr, height, width, EVERY: tl.constexpr, BLOCK: tl.constexpr):
    """Largest magnitude in each program's share of every EVERY-th row."""
    peak = tl.zeros([BLOCK], tl.float32)
    chunks = tl.cdiv(width, BLOCK)
    for index in range(tl.program_id(0), tl.cdiv(height, EVERY) * chunks, tl.num_programs(0)):
        row = (index // chunks) * EVERY
        column = (index % chunks) * BLOCK + tl.arange(0, BLOCK)
        offset = row * width.to(tl.int64) + column
        value = tl.load(x_ptr + offset, mask=column < width, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, tl.abs(value))
    tl.store(peaks_ptr + tl.program_id(0), tl.max(peak, 0))


@triton.jit
def _quantize(
    x_ptr, peaks_ptr, rows_ptr, columns_ptr, scale_ptr, height, width, margin,
    WRITE_ROWS: tl.constexpr, WRITE_COLUMNS: tl.constexpr, LARGEST: tl.constexpr,
    N_PEAKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    peak = tl.max(tl.load(peaks_ptr + tl.arange(0, N_PEAKS)), 0) * margin
    scale = _power_of_two_scale(peak, LARGEST)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < height)[:, None] & (column < width)[None, :]
    value = tl.load(x_ptr + row[:, None] * width + column[None, :], mask=inside, other=0.0)
    _store(
        value.to(tl.float32) * scale, rows_ptr, columns_ptr, row, column, height, width, inside,
        WRITE_ROWS, WRITE_COLUMNS, LARGEST,
    )  # fmt: skip
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_ptr, 1.0 / scale)


@triton.jit
def _join_statistics(
    x_ptr, branch_ptr, sum_ptr, rstd_ptr, width, eps,
    HAS_BRANCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x + branch and 1 / rms of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        x += tl.load(branch_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    tl.store(rstd_ptr + row, 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps))


@triton.jit
def _norm_quantize(
    x_ptr, rstd_ptr, weight_ptr, rows_ptr, columns_ptr, scale_ptr, height, width, root_width,
    WRITE_ROWS: tl.constexpr, WRITE_COLUMNS: tl.constexpr, LARGEST: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Norm straight to fp8. A normed element is at most sqrt(width) times the largest weight,
    so the scale needs no look at the data.
    """
    every = tl.arange(0, BLOCK)
    weights = tl.load(weight_ptr + every, mask=every < width, other=0.0).to(tl.float32)
    scale = _power_of_two_scale(root_width * tl.max(tl.abs(weights), 0), LARGEST)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < height)[:, None] & (column < width)[None, :]
    x = tl.load(x_ptr + row[:, None] * width + column[None, :], mask=inside, other=0.0)
    rstd = tl.load(rstd_ptr + row, mask=row < height, other=0.0)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    value = x.to(tl.float32) * rstd[:, None] * (weight * scale)[None, :]
    _store(
        value, rows_ptr, columns_ptr, row, column, height, width, inside,
        WRITE_ROWS, WRITE_COLUMNS, LARGEST,
    )  # fmt: skip
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_ptr, 1.0 / scale)


@triton.jit
def _swiglu_slopes(gate, up, slope):
    """Gradients of gate and up, and the hidden value."""
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    return slope * up * (sigmoid + silu * (1.0 - sigmoid)), slope * silu, silu * up


@triton.jit
def _swiglu_measure(
    slope_ptr, pairs_ptr, peaks_ptr, height, units,
    EVERY: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Largest magnitude of the gradient of gates and ups in every EVERY-th row."""
    peak = tl.zeros([UNITS, BLOCK], tl.float32)
    chunks = tl.cdiv(units, UNITS)
    lane = tl.arange(0, BLOCK)[None, :]
    for index in range(tl.program_id(0), tl.cdiv(height, EVERY) * chunks, tl.num_programs(0)):
        row = (index // chunks) * EVERY
        unit = (index % chunks) * UNITS + tl.arange(0, UNITS)[:, None]
        inside = unit < units
        cell = row * units.to(tl.int64) + unit  # of a block, as in the kernels of SwiGLU
        pair = pairs_ptr + cell * BLOCK + cell // (WIDTH // BLOCK) * WIDTH + lane
        gate = tl.load(pair, mask=inside, other=0.0)
        up = tl.load(pair + WIDTH, mask=inside, other=0.0)
        slope = tl.load(slope_ptr + cell * BLOCK + lane, mask=inside, other=0.0)
        of_gate, of_up, _ = _swiglu_slopes(
            gate.to(tl.float32), up.to(tl.float32), slope.to(tl.float32)
        )
        peak = tl.maximum(peak, tl.maximum(tl.abs(of_gate), tl.abs(of_up)))
    tl.store(peaks_ptr + tl.program_id(0), tl.max(tl.max(peak, 1), 0))


@triton.jit
def _swiglu_backward_quantize(
    slope_ptr, pairs_ptr, peaks_ptr, hidden_peaks_ptr, rows_ptr, columns_ptr, scale_ptr,
    hidden_ptr, hidden_scale_ptr, height, units, margin,
    LARGEST: tl.constexpr, HIDDEN_LARGEST: tl.constexpr, N_PEAKS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One block of columns: gradients of gates and ups, and the hidden values again."""
    peak = tl.max(tl.load(peaks_ptr + tl.arange(0, N_PEAKS)), 0) * margin
    scale = _power_of_two_scale(peak, LARGEST)
    hidden_peak = tl.max(tl.load(hidden_peaks_ptr + tl.arange(0, N_PEAKS)), 0)
    hidden_scale = _power_of_two_scale(hidden_peak, HIDDEN_LARGEST)
    unit = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)
    inside = (row < height)[:, None] & (lane < BLOCK)[None, :]
    width = units * (2 * BLOCK)
    place = unit * BLOCK + lane  # among the hidden values
    column = place + unit // (WIDTH // BLOCK) * WIDTH  # among the pairs
    source = pairs_ptr + row[:, None] * width + column[None, :]
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
    hidden_place = row[:, None] * (units * BLOCK) + place[None, :]
    slope = tl.load(slope_ptr + hidden_place, mask=inside, other=0.0)
    of_gate, of_up, hidden = _swiglu_slopes(gate, up, slope.to(tl.float32) * scale)
    _store(of_gate, rows_ptr, columns_ptr, row, column, height, width, inside, True, True, LARGEST)
    _store(
        of_up, rows_ptr, columns_ptr, row, column + WIDTH, height, width, inside,
        True, True, LARGEST,
    )  # fmt: skip
    # Rounded as the forward pass rounded it on its way to memory.
    hidden = hidden.to(pairs_ptr.dtype.element_ty).to(tl.float32) * hidden_scale
    _store(
        hidden, hidden_ptr, hidden_ptr, row, place, height, units * BLOCK, inside,
        False, True, HIDDEN_LARGEST,
    )  # fmt: skip
    if (unit == 0) & (tl.program_id(1) == 0):
        tl.store(scale_ptr, 1.0 / scale)
        tl.store(hidden_scale_ptr, 1.0 / hidden_scale)


def _outputs(
    height: int, width: int, like: Tensor, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [height, width], columns [width, height], each empty if not wanted, and scale []."""
    sizes = (height, width) if rows else (0,), (width, height) if columns else (0,)
    return (
        torch.empty(sizes[0], dtype=dtype, device=like.device),
        torch.empty(sizes[1], dtype=dtype, device=like.device),
        torch.empty((), dtype=torch.float32, device=like.device),
    )


@torch.library.custom_op("phalanx::measure", mutates_args=(), device_types="cuda")
def measure(x: Tensor, every: int) -> Tensor:
    """Partial maxima of |x| [rows, columns] over every ``every``-th row."""
    peaks = torch.empty(PEAKS, dtype=torch.float32, device=x.device)
    _measure[(PEAKS,)](x, peaks, x.shape[0], x.shape[1], EVERY=every, BLOCK=2048, num_warps=8)
    return peaks


@measure.register_fake
def _(x: Tensor, every: int) -> Tensor:
    return torch.empty(PEAKS, dtype=torch.float32, device=x.device)


@torch.library.custom_op("phalanx::quantize", mutates_args=(), device_types="cuda")
def quantize(
    x: Tensor, peaks: Tensor, dtype: torch.dtype, margin: float, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x [rows, columns] in fp8 as rows, as columns, and the factor back."""
    height, width = x.shape
    out = _outputs(height, width, x, dtype, rows, columns)
    grid = (triton.cdiv(height, _ROWS), triton.cdiv(width, _COLUMNS))
    _quantize[grid](
        x, peaks, *out, height, width, margin, WRITE_ROWS=rows, WRITE_COLUMNS=columns,
        LARGEST=torch.finfo(dtype).max, N_PEAKS=PEAKS, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


@quantize.register_fake
def _(
    x: Tensor, peaks: Tensor, dtype: torch.dtype, margin: float, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(x.shape[0], x.shape[1], x, dtype, rows, columns)


@torch.library.custom_op("phalanx::join_statistics", mutates_args=(), device_types="cuda")
def join_statistics(x: Tensor, branch: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(x + branch or empty, 1 / rms of each row). x: [rows, dim]."""
    height, width = x.shape
    total = torch.empty_like(x) if branch is not None else x.new_empty(0)
    rstd = torch.empty(height, dtype=torch.float32, device=x.device)
    _join_statistics[(height,)](
        x, x if branch is None else branch, total, rstd, width, eps,
        HAS_BRANCH=branch is not None, BLOCK=triton.next_power_of_2(width), num_warps=8,
    )  # fmt: skip
    return total, rstd


@join_statistics.register_fake
def _(x: Tensor, branch: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    total = torch.empty_like(x) if branch is not None else x.new_empty(0)
    return total, torch.empty(x.shape[0], dtype=torch.float32, device=x.device)


@torch.library.custom_op("phalanx::norm_quantize", mutates_args=(), device_types="cuda")
def norm_quantize(
    x: Tensor, rstd: Tensor, weight: Tensor, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x / rms * weight in fp8 as rows, as columns, and the factor back. x: [rows, dim]."""
    height, width = x.shape
    out = _outputs(height, width, x, dtype, rows, columns)
    grid = (triton.cdiv(height, _ROWS), triton.cdiv(width, _COLUMNS))
    _norm_quantize[grid](
        x, rstd, weight, *out, height, width, math.sqrt(width),
        WRITE_ROWS=rows, WRITE_COLUMNS=columns, LARGEST=torch.finfo(dtype).max,
        BLOCK=triton.next_power_of_2(width), ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


@norm_quantize.register_fake
def _(
    x: Tensor, rstd: Tensor, weight: Tensor, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(x.shape[0], x.shape[1], x, dtype, rows, columns)


@torch.library.custom_op("phalanx::swiglu_backward_quantize", mutates_args=(), device_types="cuda")
def swiglu_backward_quantize(
    slope: Tensor, pairs: Tensor, hidden_peaks: Tensor, group_width: int,
    dtype: torch.dtype, hidden_dtype: torch.dtype, every: int, margin: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradient of gate-up pairs [tokens, 2 * ffn] in fp8 as rows, columns and factor back, then
    the hidden values as columns and their factor. The gradient's scale comes from some rows.
    """
    height, width = pairs.shape
    block = swiglu_block(group_width)
    units = width // (2 * block)
    peaks = torch.empty(PEAKS, dtype=torch.float32, device=pairs.device)
    _swiglu_measure[(PEAKS,)](
        slope, pairs, peaks, height, units, EVERY=every, WIDTH=group_width, BLOCK=block,
        UNITS=2048 // block, num_warps=8,
    )  # fmt: skip
    out = _outputs(height, width, pairs, dtype, True, True)
    _, hidden, hidden_scale = _outputs(height, width // 2, pairs, hidden_dtype, False, True)
    tile_rows = _SWIGLU_TILE // block
    _swiglu_backward_quantize[(units, triton.cdiv(height, tile_rows))](
        slope, pairs, peaks, hidden_peaks, *out, hidden, hidden_scale, height, units, margin,
        LARGEST=torch.finfo(dtype).max, HIDDEN_LARGEST=torch.finfo(hidden_dtype).max,
        N_PEAKS=PEAKS, WIDTH=group_width, BLOCK=block, ROWS=tile_rows, num_warps=4,
    )  # fmt: skip
    return *out, hidden, hidden_scale


@swiglu_backward_quantize.register_fake
def _(
    slope: Tensor, pairs: Tensor, hidden_peaks: Tensor, group_width: int,
    dtype: torch.dtype, hidden_dtype: torch.dtype, every: int, margin: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    height, width = pairs.shape
    out = _outputs(height, width, pairs, dtype, True, True)
    _, hidden, hidden_scale = _outputs(height, width // 2, pairs, hidden_dtype, False, True)
    return *out, hidden, hidden_scale
