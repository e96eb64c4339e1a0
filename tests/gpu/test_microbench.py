"""Microbenchmarks on a real device: rates that can be, and constants that follow from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.hardware import lookup
from phalanx.plan.cost.constants import constants_toml, read_constants, shipped
from phalanx.plan.cost.measured import constants_from
from phalanx.train.calibrate.microbench import measure_device

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


def test_a_device_is_measured_below_its_peaks() -> None:
    measured = measure_device()
    gpu = lookup(measured.device)
    assert gpu is not None
    for kind, flops in measured.matmul_flops.items():
        assert 0.3 * gpu.peak_flops[kind] < flops < gpu.peak_flops[kind]
    assert 0.5 * gpu.memory_bandwidth < measured.memory_bytes_per_second < gpu.memory_bandwidth
    for rates in measured.attention.values():
        assert rates.backward < 1.2 * rates.forward
        assert 0.2 * gpu.peak_flops["bfloat16"] < rates.forward < gpu.peak_flops["bfloat16"]
    assert measured.attention[64].forward < measured.attention[128].forward
    assert 0 <= measured.attention_depth < 2048 and 0 <= measured.boost < 0.6
    assert 1e-7 < measured.kernel_seconds < 1e-4
    constants = constants_from(measured, shipped())
    assert constants.memory < 1 and 0 <= constants.unmodelled < 0.2
    assert read_constants(constants_toml(constants)).matmul.keys() == constants.matmul.keys()


def test_the_same_device_measures_the_same_twice() -> None:
    one, other = measure_device(), measure_device()
    for kind, flops in one.matmul_flops.items():
        assert other.matmul_flops[kind] == pytest.approx(flops, rel=0.05)
    for head, rates in one.attention.items():
        assert other.attention[head].forward == pytest.approx(rates.forward, rel=0.05)
    assert other.memory_bytes_per_second == pytest.approx(one.memory_bytes_per_second, rel=0.05)


def test_the_command_writes_constants_that_the_planner_takes(tmp_path: Path) -> None:
    out = tmp_path / "constants.toml"
    made = CliRunner().invoke(app, ["plan", "calibrate", "--measure", "--out", str(out)])
    assert made.exit_code == 0, made.output
    asked = ["plan", "--model", "llama3-8b", "--cluster", "h200-8", "--constants", str(out)]
    planned = CliRunner().invoke(app, asked)
    assert planned.exit_code == 0, planned.output
