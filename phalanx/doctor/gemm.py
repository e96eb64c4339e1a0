"""Sustained matrix products: TFLOP/s of each device against the catalogue and its siblings."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from phalanx.cluster.causes import Cause
from phalanx.doctor.finding import Finding, Measured, Verdict

if TYPE_CHECKING:
    import torch

CUDA_SIDE, CPU_SIDE = 8192, 512
CUDA_SECONDS, CPU_SECONDS = 2.0, 0.2
# Large products reach about 60 to 80 % of a data sheet's peak, at the clocks that the power
# allows; far below that it is not the product.
WARN_SHARE, FAIL_SHARE = 0.5, 0.33
SIBLING_SHARE = 0.93  # of the median of the same cards in one node
BATCH = 8  # products between two looks at the clock


def measure_gemm(device: str) -> dict[str, float]:
    """FLOP/s by precision, sustained."""
    import torch

    if not device.startswith("cuda"):
        return {"float32": _sustained(*operands(device, torch.float32), CPU_SECONDS)}
    rates = {"bfloat16": _sustained(*operands(device, torch.bfloat16), CUDA_SECONDS)}
    if torch.cuda.get_device_capability(device) >= (8, 9):
        rates["fp8"] = _sustained_fp8(device)
    return rates


def operands(device: str, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Two square matrices of the size that a device is measured with."""
    import torch

    side = CUDA_SIDE if device.startswith("cuda") else CPU_SIDE
    made = torch.Generator(device=device).manual_seed(1)
    # Random numbers, because zeros draw less power and run at higher clocks.
    shape = (side, side)
    left, right = (torch.randn(shape, device=device, generator=made).to(kind) for _ in range(2))
    return left, right


def _sustained(left: torch.Tensor, right: torch.Tensor, seconds: float) -> float:
    import torch

    out = torch.empty_like(left)
    return _rate(lambda: torch.mm(left, right, out=out), left, seconds)


def _sustained_fp8(device: str) -> float:
    import torch

    left, right = operands(device, torch.bfloat16)
    one = torch.ones((), device=device)
    a, b = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()

    def multiply() -> object:
        return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return _rate(multiply, left, CUDA_SECONDS)


def _rate(multiply: Callable[[], object], left: torch.Tensor, seconds: float) -> float:
    """FLOP/s of square products like ``left`` for so long."""
    import torch

    def finish() -> None:
        if left.is_cuda:
            torch.cuda.synchronize(left.device)

    multiply()
    finish()
    began, spent, products = time.perf_counter(), 0.0, 0
    while spent < seconds:
        for _ in range(BATCH):
            multiply()
        finish()
        products += BATCH
        spent = time.perf_counter() - began
    return float(2 * left.shape[0] ** 3 * products / spent)


def judge_gemm(
    rates: dict[str, dict[str, float]], peaks: dict[str, dict[str, float]]
) -> list[Finding]:
    """The verdict on every device: ``rates`` and ``peaks`` by device and precision."""
    findings = []
    for device, measured in rates.items():
        for precision, rate in measured.items():
            siblings = [
                each[precision]
                for name, each in rates.items()
                if precision in each and name.startswith("cuda") == device.startswith("cuda")
            ]
            peak = peaks.get(device, {}).get(precision, 0.0)
            findings.append(_judged(device, precision, rate, peak, median(siblings)))
    return findings


def _judged(device: str, precision: str, rate: float, peak: float, usual: float) -> Finding:
    facts: Measured = {"tflops": rate / 1e12}
    expected, verdict = "(the catalogue does not know this device)", "pass"
    if peak:
        facts["share_of_peak"] = rate / peak
        expected = f"at least {WARN_SHARE:.0%} of {peak / 1e12:.0f} TFLOP/s"
        if rate < FAIL_SHARE * peak:
            verdict = "fail"
        elif rate < WARN_SHARE * peak:
            verdict = "warn"
    if rate < SIBLING_SHARE * usual:
        facts["share_of_siblings"] = rate / usual
        expected += f", {SIBLING_SHARE:.0%} of its siblings' {usual / 1e12:.0f} TFLOP/s"
        verdict = "warn" if verdict == "pass" else verdict
    graded: Verdict = verdict  # type: ignore[assignment]
    return Finding(
        check=f"gemm {device} {precision}",
        verdict=graded,
        measured=facts,
        expected=expected,
        suggestion="" if graded == "pass" else "see gpu.power, gpu.clocks, gpu.throttle",
        cause=Cause.SLOW_COMPUTE if graded == "fail" else "",
    )
