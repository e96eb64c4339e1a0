"""Times a few large operations on the device at hand, for the planner's constants."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from phalanx.config import ConfigError
from phalanx.plan.measured import Measured

SIDE = 8192  # of a square product
HEADS, SEQUENCE, HEAD_DIM = 32, 8192, 128
MEMORY_ELEMENTS = 2**28
SMALL_KERNELS = 500


def measure_device() -> Measured:
    """Rates of matmul, attention and memory passes, and the time of an empty kernel."""
    if not torch.cuda.is_available():
        fix = "run it on a node with a GPU, or give a CSV of measured runs"
        raise ConfigError("measure", "", "this machine has no CUDA device", fix)
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


def _seconds(work: Callable[[], object], times: int = 20) -> float:
    for _ in range(3):
        work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / times


def _matmuls() -> dict[str, float]:
    # Normal numbers, not zeros: the power that switching bits draws limits the clock.
    left, right = (torch.randn(SIDE, SIDE, device="cuda").bfloat16() for _ in range(2))
    flops = 2 * SIDE**3
    found = {}
    kinds = {"float16": torch.float16}
    if torch.cuda.get_device_capability() >= (8, 0):
        kinds["bfloat16"] = torch.bfloat16
    for name, kind in kinds.items():
        a, b = left.to(kind), right.to(kind)
        found[name] = flops / _seconds(lambda a=a, b=b: a @ b)  # type: ignore[misc]
    if torch.cuda.get_device_capability() >= (8, 9):
        one = torch.ones((), device="cuda")
        a8, b8 = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
        found["fp8"] = flops / _seconds(
            lambda: torch._scaled_mm(
                a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        )
    return found


def _attention() -> tuple[float, float]:
    shape = (1, HEADS, SEQUENCE, HEAD_DIM)
    q, k, v = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    flops = 2 * SEQUENCE**2 * HEADS * HEAD_DIM  # both products, causal half
    with torch.no_grad():
        forward = _seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    ones = torch.ones_like(out)
    backward = _seconds(lambda: torch.autograd.grad(out, (q, k, v), ones, retain_graph=True))
    return flops / forward, 2.5 * flops / backward


def _memory() -> float:
    a, b, out = (torch.zeros(MEMORY_ELEMENTS, device="cuda", dtype=torch.bfloat16) for _ in "abc")
    return 3 * 2 * MEMORY_ELEMENTS / _seconds(lambda: torch.add(a, b, out=out))


def _small_kernel() -> float:
    value = torch.zeros(16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(SMALL_KERNELS):
            value.add_(1)
    return _seconds(graph.replay) / SMALL_KERNELS
