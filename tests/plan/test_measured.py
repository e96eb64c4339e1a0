"""Constants from microbenchmarks: shares of the device's peaks, and a file that loads back."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from phalanx.config import ConfigError
from phalanx.plan.constants import constants_toml, shipped
from phalanx.plan.measured import Measured, constants_from
from phalanx.plan.request import load_constants

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
