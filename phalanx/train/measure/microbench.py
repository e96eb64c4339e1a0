"""Times a few large operations on the device at hand, for the planner's constants.

Each operation first runs until the clocks have settled under its own load, then in several
batches between CUDA events; the median batch counts. A few seconds in all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from phalanx.config import ConfigError
from phalanx.hardware import lookup
from phalanx.model import ops
from phalanx.model.attention import CUDA_BACKENDS
from phalanx.plan.cost.measured import Measured

SIDE = 8192  # of a square product
HEADS, SEQUENCE, HEAD_DIM = 32, 8192, 128
MEMORY_ELEMENTS = 2**28
SMALL_KERNELS = 500
FREE_BYTES = 6 * 2**30  # that the largest of these takes, with room to spare
SETTLE_SECONDS = 0.5  # of load before the clock is read: power limits bite by then
BATCH_SECONDS, BATCHES = 0.05, 9


def measure_device() -> Measured:
    """Rates of matmul, attention and memory passes, and the time of an empty kernel."""
    _refuse()
    forward, backward = _attention()
    return Measured(
        device=torch.cuda.get_device_name(),
        matmul_flops=_matmuls(),
        matmul_depth=SIDE,
        attention_flops=forward,
        attention_backward_flops=backward,
        memory_bytes_per_second=_memory(),
        kernel_seconds=_small_kernel(),
    )


def _refuse() -> None:
    if not torch.cuda.is_available():
        fix = "run it on a node with a GPU, or give a CSV of measured runs"
        raise ConfigError("measure", "", "this machine has no CUDA device", fix)
    name = torch.cuda.get_device_name()
    if lookup(name) is None:
        fix = "add it to phalanx/hardware/gpus.toml: shares need its peaks"
        raise ConfigError("measure", name, "is not in the catalogue", fix)
    free, _ = torch.cuda.mem_get_info()
    if free < FREE_BYTES:
        rule = f"has {free / 2**30:.1f} GiB free, {FREE_BYTES / 2**30:.0f} are needed"
        raise ConfigError("measure", name, rule, "stop what else runs on it")


def _seconds(work: Callable[[], object]) -> float:
    """Seconds of one call, the device being warm and busy with nothing else."""
    work()
    torch.cuda.synchronize()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < SETTLE_SECONDS:
        work()
        calls += 1
        if calls % 4 == 0:  # the queue must not run ahead of the clock
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    each = (time.perf_counter() - began) / calls
    times = max(1, round(BATCH_SECONDS / each))
    samples = []
    for _ in range(BATCHES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            work()
        end.record()
        end.synchronize()
        samples.append(float(start.elapsed_time(end)) / 1e3 / times)
    return statistics.median(samples)


def _half() -> torch.dtype:
    """The 16-bit format that the device trains in."""
    return torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16


def _matmuls() -> dict[str, float]:
    # Normal numbers, not zeros: the power that switching bits draws limits the clock.
    left, right = (torch.randn(SIDE, SIDE, device="cuda").to(_half()) for _ in range(2))
    flops = 2 * SIDE**3
    name = "bfloat16" if _half() is torch.bfloat16 else "float16"
    rates = {name: flops / _seconds(lambda: ops.matmul(left, right))}
    # AMD's first fp8 is another format (e4m3fnuz); the trainer has no kernels for it.
    if torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9):
        one = torch.ones((), device="cuda")
        a8, b8 = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
        rates["fp8"] = flops / _seconds(
            lambda: torch._scaled_mm(
                a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        )
    return rates


def _attention() -> tuple[float, float]:
    """Causal attention as the trainer calls it: its kernels, and its layout of heads."""
    shape = (1, SEQUENCE, HEADS, HEAD_DIM)
    q, k, v = (
        torch.randn(shape, device="cuda", dtype=_half(), requires_grad=True) for _ in range(3)
    )

    def attend() -> torch.Tensor:
        heads = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        with sdpa_kernel(CUDA_BACKENDS, set_priority=True):
            return F.scaled_dot_product_attention(*heads, is_causal=True)

    flops = 2 * SEQUENCE**2 * HEADS * HEAD_DIM  # both products, causal half
    with torch.no_grad():
        forward = _seconds(attend)
    out = attend()
    slope = torch.randn_like(out)
    backward = _seconds(lambda: torch.autograd.grad(out, (q, k, v), slope, retain_graph=True))
    return flops / forward, 2.5 * flops / backward


def _memory() -> float:
    a, b, out = (torch.randn(MEMORY_ELEMENTS, device="cuda", dtype=_half()) for _ in range(3))
    return 3 * 2 * MEMORY_ELEMENTS / _seconds(lambda: torch.add(a, b, out=out))


def _small_kernel() -> float:
    value = torch.zeros(16, device="cuda")
    value.add_(1)  # a kernel must be loaded before it can be captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(SMALL_KERNELS):
            value.add_(1)
    return _seconds(graph.replay) / SMALL_KERNELS
