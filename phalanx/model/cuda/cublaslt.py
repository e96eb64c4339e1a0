"""Matmuls through cuBLASLt with the algorithm that measured fastest for their shape.

The library's first choice assumes full clocks. Under the power limit, where long training
steps run, other tile shapes are up to a tenth faster, so each shape's candidates are
timed when it is first met, unless a table has its choice (`matmul_table.py`). Imported on CUDA
builds only.
"""

from __future__ import annotations

import ctypes
import functools
import os
import statistics
from ctypes import Structure, byref, c_float, c_int, c_int8, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.model.cuda.matmul_table import MatmulTable, Tuned

WORKSPACE_BYTES = 32 << 20
CANDIDATES = 8
ROUNDS = 5  # the candidates take turns this often, so that all see the same clocks
RUNS = 2  # timed together in one turn
MARGIN = 1.03  # how much faster a candidate must be to replace the library's choice
SMALLEST = 1 << 34  # FLOPs below which choosing is not worth the time

# Values of cublasLt.h and library_types.h.
_COMPUTE_32F, _R_32F = 68, 0
_TYPES = {torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_TRANSPOSE_A, _TRANSPOSE_B, _SCALE_A, _SCALE_B, _FAST_ACCUMULATION = 3, 4, 17, 18, 25
_MAX_WORKSPACE = 1

# Where choices of this process are kept, and found by the next one; "": nowhere.
FOLDER_VARIABLE = "PHALANX_MATMULS"


class Algorithm(Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class MatmulProblem(NamedTuple):
    """out [rows, columns] = op(a) @ op(b), all row-major; op transposes where the flag is set."""

    rows: int
    columns: int
    inner: int
    turn_a: bool
    turn_b: bool
    a: torch.dtype
    b: torch.dtype
    fast: bool  # fp8: sum in the tensor cores' short format

    @property
    def text(self) -> str:
        """Its name in tables."""
        turns = f"{'t' if self.turn_a else 'n'}{'t' if self.turn_b else 'n'}"
        types = "-".join(str(each).removeprefix("torch.") for each in (self.a, self.b))
        shape = f"{self.rows}x{self.columns}x{self.inner}"
        return f"{shape}-{turns}-{types}{'-fast' if self.fast else ''}"


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library that torch itself has loaded; None where it cannot be found."""
    assert torch.version.cuda is not None
    try:
        loaded = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None
    loaded.cublasLtMatmul.argtypes = [c_void_p] * 14 + [c_size_t, c_void_p]
    loaded.cublasLtMatmulDescSetAttribute.argtypes = [c_void_p, c_int, c_void_p, c_size_t]
    loaded.cublasLtMatrixLayoutCreate.argtypes = [c_void_p, c_int, c_uint64, c_uint64, c_uint64]
    return loaded


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt failed with status {status}")


@functools.cache
def table(device: int) -> MatmulTable:
    """The choices that are known for a device and the library that is loaded."""
    lib = library()
    assert lib is not None
    lib.cublasLtGetVersion.restype = c_size_t
    folder = os.environ.get(FOLDER_VARIABLE)
    name = torch.cuda.get_device_name(device)
    return MatmulTable(name, int(lib.cublasLtGetVersion()), Path(folder) if folder else None)


@functools.cache
def _handle(device: int) -> c_void_p:
    lib, handle = library(), c_void_p()
    assert lib is not None
    with torch.cuda.device(device):
        _check(lib.cublasLtCreate(byref(handle)))
    return handle


@functools.cache
def _workspace(device: int, stream: int) -> Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=torch.device("cuda", device))


class MatmulPlan:
    """A problem's descriptors and its chosen algorithm.

    The library is column-major: it is asked for the transpose, with a and b exchanged.
    """

    def __init__(self, problem: MatmulProblem, device: int) -> None:
        lib = library()
        assert lib is not None
        self.problem, self.device = problem, device
        self.lib, self.handle = lib, _handle(device)
        self.operation = c_void_p()
        _check(lib.cublasLtMatmulDescCreate(byref(self.operation), _COMPUTE_32F, _R_32F))
        self._set(_TRANSPOSE_A, c_int(problem.turn_b))
        self._set(_TRANSPOSE_B, c_int(problem.turn_a))
        if problem.fast:
            self._set(_FAST_ACCUMULATION, c_int8(1))
        p = problem
        a_shape = (p.inner, p.rows) if p.turn_a else (p.rows, p.inner)
        b_shape = (p.columns, p.inner) if p.turn_b else (p.inner, p.columns)
        self.a, self.b = self._layout(p.a, *a_shape), self._layout(p.b, *b_shape)
        self.out = self._layout(torch.bfloat16, p.rows, p.columns)
        self.one, self.zero = c_float(1.0), c_float(0.0)
        self.candidates: list[Algorithm] = []
        self.chosen: Algorithm | None = None

    def _set(self, attribute: int, value: ctypes._SimpleCData[int] | c_void_p) -> None:
        size = ctypes.sizeof(value)
        _check(
            self.lib.cublasLtMatmulDescSetAttribute(self.operation, attribute, byref(value), size)
        )

    def _layout(self, dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
        layout = c_void_p()
        kind = _TYPES[dtype]
        _check(self.lib.cublasLtMatrixLayoutCreate(byref(layout), kind, columns, rows, columns))
        return layout

    def run(self, a: Tensor, b: Tensor, out: Tensor, scales: tuple[Tensor, Tensor] | None) -> None:
        """Compute into ``out``; the first call also chooses the algorithm."""
        self.scale(scales)
        if self.chosen is None:
            self.chosen = self._known() or self._timed(a, b, out)
        self.launch(self.chosen, a, b, out)

    def scale(self, scales: tuple[Tensor, Tensor] | None) -> None:
        """What the operands are multiplied by; fp8 alone is."""
        if scales is not None:
            self._set(_SCALE_A, c_void_p(scales[1].data_ptr()))
            self._set(_SCALE_B, c_void_p(scales[0].data_ptr()))

    def _known(self) -> Algorithm | None:
        """The choice of a table, if this library takes it."""
        tuned = table(self.device).find(self.problem.text)
        if tuned is None:
            return None
        checked, given = Algorithm(), (c_uint64 * 8)(*tuned.algorithm)
        status = self.lib.cublasLtMatmulAlgoCheck(
            self.handle, self.operation, self.b, self.a, self.out, self.out,
            byref(given), byref(checked),
        )  # fmt: skip
        if status or checked.state or checked.workspace > WORKSPACE_BYTES:
            return None
        checked.algorithm = given
        return checked

    def _timed(self, a: Tensor, b: Tensor, out: Tensor) -> Algorithm:
        """The candidate that is fastest now, which is remembered."""
        self.candidates = self.ask(CANDIDATES)
        if torch.cuda.is_current_stream_capturing():
            return self.candidates[0]
        chosen, seconds = self._choose(a, b, out)
        found = Tuned(tuple(chosen.algorithm), chosen.workspace, seconds * 1e6)
        table(self.device).remember(self.problem.text, found)
        return chosen

    def launch(self, candidate: Algorithm, a: Tensor, b: Tensor, out: Tensor) -> None:
        stream = torch.cuda.current_stream(self.device).cuda_stream
        target = out.data_ptr()
        _check(
            self.lib.cublasLtMatmul(
                self.handle, self.operation, byref(self.one), b.data_ptr(), self.b, a.data_ptr(),
                self.a, byref(self.zero), target, self.out, target, self.out,
                byref(candidate), _workspace(self.device, stream).data_ptr(), WORKSPACE_BYTES,
                stream,
            )
        )  # fmt: skip

    def ask(self, most: int) -> list[Algorithm]:
        """The library's candidates, its favourite first."""
        preference, count = c_void_p(), c_int()
        results = (Algorithm * most)()
        _check(self.lib.cublasLtMatmulPreferenceCreate(byref(preference)))
        limit = c_uint64(WORKSPACE_BYTES)
        _check(
            self.lib.cublasLtMatmulPreferenceSetAttribute(
                preference, _MAX_WORKSPACE, byref(limit), c_size_t(ctypes.sizeof(limit))
            )
        )
        _check(
            self.lib.cublasLtMatmulAlgoGetHeuristic(
                self.handle, self.operation, self.b, self.a, self.out, self.out, preference,
                most, results, byref(count),
            )
        )  # fmt: skip
        _check(self.lib.cublasLtMatmulPreferenceDestroy(preference))
        if not count.value:
            raise RuntimeError("cuBLASLt has no algorithm for this matmul")
        return list(results[: count.value])

    def _choose(self, a: Tensor, b: Tensor, out: Tensor) -> tuple[Algorithm, float]:
        """The candidate with the best median time, in seconds; ``out`` is written on the way."""
        times: list[list[float]] = [[] for _ in self.candidates]
        for _ in range(ROUNDS):
            for candidate, measured in zip(self.candidates, times, strict=True):
                measured.append(self._seconds(candidate, a, b, out))
        medians = [statistics.median(measured) for measured in times]
        best = min(range(len(medians)), key=medians.__getitem__)
        best = best if medians[0] > MARGIN * medians[best] else 0
        return self.candidates[best], medians[best]

    def _seconds(self, candidate: Algorithm, a: Tensor, b: Tensor, out: Tensor) -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.launch(candidate, a, b, out)
        before.record()
        for _ in range(RUNS):
            self.launch(candidate, a, b, out)
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / RUNS / 1e3


@functools.cache
def plan(problem: MatmulProblem, device: int) -> MatmulPlan:
    """The plan of a problem, made once."""
    return MatmulPlan(problem, device)


def applies(a: Tensor, b: Tensor, rows: int, columns: int, inner: int) -> bool:
    """Whether these operands can and should go through here.

    Not in deterministic mode: which algorithm wins may differ from run to run.
    """
    return (
        a.is_cuda
        and a.dtype in _TYPES
        and b.dtype in _TYPES
        and a.is_contiguous()
        and b.is_contiguous()
        and 2 * rows * columns * inner >= SMALLEST
        and all(size % 16 == 0 for size in (rows, columns, inner))
        and not torch.are_deterministic_algorithms_enabled()
        and library() is not None
    )


def shape_of(a: Tensor, b: Tensor, turn_a: bool, turn_b: bool) -> tuple[int, int, int]:
    """Rows, columns and inner size of op(a) @ op(b)."""
    rows, inner = a.shape[::-1] if turn_a else a.shape
    return rows, b.shape[0] if turn_b else b.shape[1], inner


@torch.library.custom_op("phalanx::matmul", mutates_args=(), device_types="cuda")
def matmul(a: Tensor, b: Tensor, turn_a: bool, turn_b: bool) -> Tensor:
    """op(a) @ op(b) in bf16."""
    rows, columns, inner = shape_of(a, b, turn_a, turn_b)
    out = a.new_empty(rows, columns)
    problem = MatmulProblem(rows, columns, inner, turn_a, turn_b, a.dtype, b.dtype, False)
    plan(problem, a.device.index).run(a, b, out, None)
    return out


@matmul.register_fake
def _(a: Tensor, b: Tensor, turn_a: bool, turn_b: bool) -> Tensor:
    rows, columns, _ = shape_of(a, b, turn_a, turn_b)
    return a.new_empty(rows, columns)


@torch.library.custom_op("phalanx::matmul_fp8", mutates_args=(), device_types="cuda")
def matmul_fp8(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, fast: bool) -> Tensor:
    """a [m, k] times the transpose of b [n, k], times both scales, in bf16."""
    (rows, inner), columns = a.shape, b.shape[0]
    out = torch.empty((rows, columns), dtype=torch.bfloat16, device=a.device)
    problem = MatmulProblem(rows, columns, inner, False, True, a.dtype, b.dtype, fast)
    plan(problem, a.device.index).run(a, b, out, (a_scale, b_scale))
    return out


@matmul_fp8.register_fake
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, fast: bool) -> Tensor:
    return torch.empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16, device=a.device)
