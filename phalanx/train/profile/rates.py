"""What the device at hand reaches: products by format, and passes over memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from phalanx.train.profile.facts import DeviceRates

SIDES = {"cuda": 4096, "cpu": 384}  # of a square product: large enough to be bound by arithmetic
ELEMENTS = {"cuda": 1 << 27, "cpu": 1 << 23}  # of 4 bytes: larger than caches
FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SECONDS = 0.05  # of each measurement
BATCHES = 3


def measure_rates(device: torch.device) -> DeviceRates:
    """The best of a few short batches: a fraction of a second in all."""
    side, elements = SIDES[device.type], ELEMENTS[device.type]
    products = {}
    for name, dtype in FORMATS.items():
        # Normal numbers, not zeros: the power that switching bits draws limits the clock.
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(left)
        products[name] = 2 * side**3 / _seconds(device, partial(torch.mm, left, right, out=out))
    source = torch.zeros(elements, device=device)
    target = torch.empty_like(source)
    moved = 2 * source.numel() * source.element_size()
    return DeviceRates(products, moved / _seconds(device, lambda: target.copy_(source)))


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Of one call."""
    times, best = 1, float("inf")
    for _ in range(BATCHES + 1):  # the first one warms up and says how many make a batch
        _wait(device)
        began = time.perf_counter()
        for _ in range(times):
            work()
        _wait(device)
        each = (time.perf_counter() - began) / times
        best = min(best, each)
        times = max(1, round(SECONDS / BATCHES / best))
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
