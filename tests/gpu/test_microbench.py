"""Microbenchmarks on a real device: rates that can be, and constants that follow from them."""

from __future__ import annotations

import pytest

from phalanx.hardware import lookup
from phalanx.plan.constants import shipped
from phalanx.plan.measured import constants_from
from phalanx.train.microbench import measure_device

pytestmark = pytest.mark.gpu


def test_a_device_is_measured_below_its_peaks() -> None:
    measured = measure_device()
    gpu = lookup(measured.device)
    assert gpu is not None
    for kind, flops in measured.matmul_flops.items():
        assert 0.3 * gpu.peak_flops[kind] < flops < gpu.peak_flops[kind]
    assert 0.5 * gpu.memory_bandwidth < measured.memory_bytes_per_second < gpu.memory_bandwidth
    assert measured.attention_backward_flops < 1.2 * measured.attention_flops
    assert 1e-7 < measured.kernel_seconds < 1e-4
    assert constants_from(measured, shipped()).memory < 1
