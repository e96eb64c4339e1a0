"""Constants from microbenchmarks: shares of the device's peaks, and a file that loads back."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.config import ConfigError
from phalanx.hardware import cluster
from phalanx.plan.cost.attention import attention_rates
from phalanx.plan.cost.constants import constants_toml, shipped
from phalanx.plan.cost.matmul import sustained_rate
from phalanx.plan.cost.measured import Measured, MeasuredAttention, TimedStep, constants_from
from phalanx.plan.cost.predict import predict
from phalanx.plan.machine import machine_of
from phalanx.plan.question.emit import mapping_of, workload_of
from phalanx.plan.question.request import load_constants
from phalanx.train.calibrate.small_step import small_job

H200 = Measured(
    device="NVIDIA H200",
    matmul_flops={"bfloat16": 740e12, "fp8": 1300e12},
    matmul_depth=8192,
    attention={
        64: MeasuredAttention(forward=400e12, backward=360e12),
        128: MeasuredAttention(forward=588e12, backward=488e12),
    },
    attention_sequence=8192,
    attention_depth=512.0,
    boost=0.25,
    memory_bytes_per_second=4.2e12,
    kernel_seconds=2e-6,
)


def test_rates_become_shares_of_the_peaks() -> None:
    found = constants_from(H200, shipped())
    deeper = 1 + shipped().matmul_depth / 8192
    assert found.matmul["hopper:bfloat16"] == pytest.approx(740 * deeper / 989.4)
    longer = 1 + 512 / 8192
    assert found.attention["hopper:flash3"] == pytest.approx(588 * longer / 989.4)
    assert found.attention["hopper:flash3:64"] == pytest.approx(400 * longer / 989.4)
    assert found.attention_backward_of["hopper:flash3:64"] == pytest.approx(0.9)
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
    attended = MeasuredAttention(
        forward=0.4 * machine.peak(kind), backward=0.3 * machine.peak(kind)
    )
    measured = structs.replace(
        H200,
        device=device,
        matmul_flops={kind: reached},
        attention={128: attended},
        attention_depth=0.0,
    )
    found = constants_from(measured, shipped())
    rate = sustained_rate(machine, kind, found)
    assert rate * side / (side + found.matmul_depth) == pytest.approx(reached, rel=1e-6)
    kernel = "flash" if gpu == "v100" else "flash3"
    rates = attention_rates(machine, kernel, 128, found)
    assert rates == pytest.approx((attended.forward, attended.backward)) or kind == "fp8"


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


def small_steps(unmodelled: float, host_seconds: float) -> tuple[TimedStep, ...]:
    """Two steps as a device would take them whose terms have these constants."""
    true = structs.replace(
        constants_from(H200, shipped()), unmodelled=unmodelled, step_seconds=host_seconds
    )
    steps = []
    for micro_batches in (2, 6):
        job = small_job(micro_batches)
        found = predict(workload_of(job), mapping_of(job), cluster("h200-1"), constants=true)
        steps.append(
            TimedStep(
                workload=workload_of(job), mapping=mapping_of(job), seconds=found.step_seconds
            )
        )
    return tuple(steps)


@pytest.mark.parametrize(("unmodelled", "host_seconds"), [(0.03, 0.004), (0.0, 0.0)])
def test_two_steps_give_what_no_term_counts(unmodelled: float, host_seconds: float) -> None:
    measured = structs.replace(H200, steps=small_steps(unmodelled, host_seconds))
    found = constants_from(measured, shipped())
    assert found.unmodelled == pytest.approx(unmodelled, abs=1e-6)
    assert found.step_seconds == pytest.approx(host_seconds, abs=1e-6)


def test_steps_that_are_faster_than_their_terms_take_nothing_off() -> None:
    measured = structs.replace(H200, steps=small_steps(-0.05, 0.01))
    assert constants_from(measured, shipped()).unmodelled == 0.0


def test_steps_that_say_nothing_are_refused() -> None:
    short, _ = small_steps(0.0, 0.0)
    same = (short, structs.replace(short, seconds=2 * short.seconds))
    with pytest.raises(ConfigError, match="two numbers of micro-batches"):
        constants_from(structs.replace(H200, steps=same), shipped())


def test_products_gain_what_other_kernels_leave_of_the_power() -> None:
    job = small_job(2)
    alone, boosted = (
        predict(workload_of(job), mapping_of(job), cluster("h200-1"), constants=constants).parts
        for constants in (
            structs.replace(shipped(), boost=0.0, unmodelled=0.0),
            structs.replace(shipped(), boost=0.25, unmodelled=0.0),
        )
    )
    others = sum(alone.values()) - alone["matmul"] - alone["host"]
    share = boosted["matmul"] / (boosted["matmul"] + others)
    assert boosted["matmul"] * (1 + 0.25 * (1 - share)) == pytest.approx(alone["matmul"])
    for name in alone.keys() - {"matmul"}:
        assert boosted[name] == pytest.approx(alone[name])


def test_short_rows_of_attention_cost_more() -> None:
    def attention(sequence: int, depth: float) -> float:
        job = small_job(2)
        job = structs.replace(job, data=structs.replace(job.data, sequence=sequence))
        constants = structs.replace(shipped(), attention_depth=depth, kernel_seconds=0.0)
        on = cluster("h200-1")
        return predict(workload_of(job), mapping_of(job), on, constants=constants).parts[
            "attention"
        ]

    assert attention(2048, 512.0) == pytest.approx(1.25 * attention(2048, 0.0))
    assert attention(8192, 512.0) == pytest.approx(1.0625 * attention(8192, 0.0))
