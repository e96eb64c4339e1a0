"""Times a few large operations on the device at hand, for the planner's constants.

Each operation first runs until the clocks have settled under its own load, then in several
batches between CUDA events; the median batch counts. Products also run between kernels of
attention, as in a step: where a board's power is the limit, they are faster there than alone. Two
steps of a small model then show what no term of the step model counts. Half a minute in all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from phalanx.config import ConfigError
from phalanx.hardware import lookup
from phalanx.model import ops
from phalanx.model.cuda.attention import causal_attention
from phalanx.plan.cost.measured import Measured, MeasuredAttention
from phalanx.train.calibrate.small_step import timed_steps

SIDE = 8192  # of a square product
HEADS, KEY_HEADS, SEQUENCE, SHORT = 32, 8, 8192, 2048
HEAD_DIMS = (64, 128)
MIXED_PRODUCTS = 2  # before each attention, so that they take about half of the time
MEMORY_ELEMENTS = 2**28
SMALL_KERNELS = 500
FREE_BYTES = 6 * 2**30  # that the largest of these takes, with room to spare
SETTLE_SECONDS = 0.5  # of load before the clock is read: power limits bite by then
BATCH_SECONDS, BATCHES = 0.05, 9


def measure_device() -> Measured:
    """Rates of matmul, attention and memory passes, and the time of an empty kernel."""
    _refuse()
    rates, depth = _attentions()
    matmuls = _matmuls()
    return Measured(
        device=torch.cuda.get_device_name(),
        matmul_flops=matmuls,
        matmul_depth=SIDE,
        attention=rates,
        attention_sequence=SEQUENCE,
        attention_depth=depth,
        boost=_boost(next(iter(matmuls.values()))),
        memory_bytes_per_second=_memory(),
        kernel_seconds=_small_kernel(),
        steps=timed_steps() if _half() is torch.bfloat16 else (),
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


def _sides() -> tuple[torch.Tensor, torch.Tensor]:
    # Normal numbers, not zeros: the power that switching bits draws limits the clock.
    left, right = (torch.randn(SIDE, SIDE, device="cuda").to(_half()) for _ in range(2))
    return left, right


def _matmuls() -> dict[str, float]:
    left, right = _sides()
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


class _Attention:
    """Causal attention as the trainer calls it: its kernels, its layout, grouped heads."""

    def __init__(self, head_dim: int, sequence: int) -> None:
        batch = SEQUENCE // sequence
        self._q, self._k, self._v = (
            torch.randn(
                (batch, sequence, heads, head_dim), device="cuda", dtype=_half(), requires_grad=True
            )
            for heads in (HEADS, KEY_HEADS, KEY_HEADS)
        )
        # Both products, causal half.
        self.flops = 2 * batch * sequence**2 * HEADS * head_dim
        self._out = self.forward()
        self._slope = torch.randn_like(self._out)

    def forward(self) -> torch.Tensor:
        return causal_attention(self._q, self._k, self._v, self._q.shape[-1] ** -0.5)

    def backward(self) -> None:
        inputs = (self._q, self._k, self._v)
        torch.autograd.grad(self._out, inputs, self._slope, retain_graph=True)

    def seconds(self) -> tuple[float, float]:
        with torch.no_grad():
            forward = _seconds(self.forward)
        return forward, _seconds(self.backward)


def _attentions() -> tuple[dict[int, MeasuredAttention], float]:
    """Rates by head width, and what a row costs beside its tokens, in tokens."""
    rates, long, short = {}, 0.0, 0.0
    for head_dim in HEAD_DIMS:
        whole = _Attention(head_dim, SEQUENCE)
        forward, backward = whole.seconds()
        rates[head_dim] = MeasuredAttention(
            forward=whole.flops / forward, backward=2.5 * whole.flops / backward
        )
        part = _Attention(head_dim, SHORT)
        long += (forward + backward) / whole.flops
        short += sum(part.seconds()) / part.flops
    slower = short / long
    depth = (slower - 1) / (1 / SHORT - slower / SEQUENCE)
    return rates, max(0.0, depth)


def _boost(alone: float) -> float:
    """How much faster products would run with all of the board's power to themselves."""
    left, right = _sides()
    attention = _Attention(HEAD_DIMS[-1], SEQUENCE)

    def mixed() -> tuple[torch.cuda.Event, ...]:
        began, computed, ended = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        began.record()
        for _ in range(MIXED_PRODUCTS):
            ops.matmul(left, right)
        computed.record()
        with torch.no_grad():
            attention.forward()
        attention.backward()
        ended.record()
        return began, computed, ended

    _seconds(mixed)
    events = [mixed() for _ in range(BATCHES * 4)]
    torch.cuda.synchronize()
    products = float(sum(began.elapsed_time(computed) for began, computed, _ in events)) / 1e3
    whole = float(sum(began.elapsed_time(ended) for began, _, ended in events)) / 1e3
    rate = len(events) * MIXED_PRODUCTS * 2 * SIDE**3 / products
    return max(0.0, (rate / alone - 1) / (1 - products / whole))


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
