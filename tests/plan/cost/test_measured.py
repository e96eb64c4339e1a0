"""Constants from microbenchmarks: shares of the device's peaks, and a file that loads back."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.config import ConfigError
from phalanx.hardware import cluster
from phalanx.plan.cost.attention import attention_rate
from phalanx.plan.cost.constants import constants_toml, shipped
from phalanx.plan.cost.matmul import sustained_rate
from phalanx.plan.cost.measured import Measured, constants_from
from phalanx.plan.machine import machine_of
from phalanx.plan.question.request import load_constants

H200 = Measured(
    device="NVIDIA H200",
    matmul_flops={"bfloat16": 740e12, "fp8": 1300e12},
    matmul_depth=8192,
    attention_flops=588e12,
    attention_backward_flops=488e12,
    memory_bytes_per_second=4.2e12,
    kernel_seconds=2e-6,
)


def test_rates_become_shares_of_the_peaks() -> None:
    found = constants_from(H200, shipped())
    deeper = 1 + shipped().matmul_depth / 8192
    assert found.matmul["hopper:bfloat16"] == pytest.approx(740 * deeper / 989.4)
    assert found.attention["hopper:flash3"] == pytest.approx(588 / 989.4)
    assert found.attention_backward == pytest.approx(488 / 588)
    assert found.memory == pytest.approx(4.2 / 4.8)
    assert found.matmul["ampere:bfloat16"] == shipped().matmul["ampere:bfloat16"]


@pytest.mark.parametrize(
    ("gpu", "device", "kind"),
    [
        ("h200", "NVIDIA H200", "bfloat16"),
        ("b200", "NVIDIA B200", "fp8"),
        ("b300", "NVIDIA B300", "bfloat16"),
        ("v100", "Tesla V100-SXM2-32GB", "float16"),
    ],
)
def test_the_step_model_gives_back_the_rate_that_was_measured(
    gpu: str, device: str, kind: str
) -> None:
    machine = machine_of(cluster(f"{gpu}-8"), 8)
    reached = 0.6 * machine.peak(kind)
    side = 8192.0
    measured = structs.replace(
        H200, device=device, matmul_flops={kind: reached}, attention_flops=0.4 * machine.peak(kind)
    )
    found = constants_from(measured, shipped())
    rate = sustained_rate(machine, kind, found)
    assert rate * side / (side + found.matmul_depth) == pytest.approx(reached, rel=1e-6)
    kernel = "flash" if gpu == "v100" else "flash3"
    attended = attention_rate(machine, kernel, found)
    assert attended == pytest.approx(0.4 * machine.peak(kind), rel=1e-6) or kind == "fp8"


def test_a_machine_without_a_gpu_is_told_so() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    result = CliRunner().invoke(app, ["plan", "calibrate", "--measure"])
    assert result.exit_code == 2
    assert "no CUDA device" in result.output and "CSV" in result.output


def test_no_share_exceeds_the_whole() -> None:
    fast = structs.replace(H200, memory_bytes_per_second=9e12, matmul_flops={"bfloat16": 1e16})
    found = constants_from(fast, shipped())
    assert found.memory == found.matmul["hopper:bfloat16"] == 1.0


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="not in the catalogue"):
        constants_from(structs.replace(H200, device="Toaster 3000"), shipped())


def test_constants_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "constants.toml"
    path.write_text(constants_toml(shipped()), encoding="utf-8")
    assert load_constants(path).memory == pytest.approx(shipped().memory, rel=1e-3)
    path.write_text("memory = 'much'\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_constants(path)
    with pytest.raises(ConfigError, match="no such file"):
        load_constants(tmp_path / "nowhere.toml")
