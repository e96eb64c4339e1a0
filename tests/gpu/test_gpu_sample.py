"""NVML of a real card: what an agent tells of its GPUs while one of them works."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch

from phalanx.observe.node.node_sample import Sampler

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(120)]


def test_a_working_cards_numbers_are_read(tmp_path: Path) -> None:
    pytest.importorskip("pynvml", reason="pip install 'phalanx[nvidia]'")
    sampler = Sampler(tmp_path)
    sampler.look()
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        for _ in range(20):
            matrix @ matrix
        torch.cuda.synchronize()
    _, gpus = sampler.look()
    known = {name: values[0] for name, values in gpus.items() if not math.isnan(values[0])}
    assert known["gpu_utilization"] > 0.5
    assert known["gpu_power_watts"] > 50
    assert known["gpu_temperature_celsius"] > 10
    assert known["gpu_memory_used_bytes"] >= matrix.nbytes
    assert known["gpu_sm_clock_megahertz"] > 100
