"""The meter reads the device once an interval and says what a number is a share of."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from phalanx.hardware import lookup
from phalanx.plan.memory.model_counts import flops_per_token
from phalanx.train.exits import NonFiniteLoss
from phalanx.train.measure.meter import Meter, Peak, device_peak
from phalanx.train.measure.timing import StepTimer
from phalanx.train.trainer import StepOutcome
from tests.train.forked_runs import small_job

CPU = torch.device("cpu")


def outcome(loss: float = 4.0, norm: float = 1.0, skipped: bool = False) -> StepOutcome:
    return StepOutcome(
        loss=torch.tensor(loss),
        grad_norm=torch.tensor(norm),
        skipped=torch.tensor(skipped),
        learning_rate=1e-3,
        first_sample=0,
        samples=4,
        tokens=64,
        labels=1,
        damaged=0,
        stop=False,
    )


def meter(tmp_path: Path, **overrides: object) -> Meter:
    return Meter(small_job(tmp_path, 1, **overrides), CPU, StepTimer(CPU))


class Transfers:
    """Counts every way in which a tensor's value can reach the host."""

    WAYS = ("tolist", "item", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for way in self.WAYS:
            monkeypatch.setattr(torch.Tensor, way, self._counted(getattr(torch.Tensor, way)))

    def _counted(self, original):  # type: ignore[no-untyped-def]
        def counted(*args, **kwargs):  # type: ignore[no-untyped-def]
            self.count += 1
            return original(*args, **kwargs)

        return counted


def test_an_interval_costs_one_transfer_whatever_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = meter(tmp_path)
    outcomes = [outcome(loss=float(step)) for step in range(1, 33)]
    transfers = Transfers(monkeypatch)
    for step, made in enumerate(outcomes, start=1):
        measured.add(step, 64 * step, made)
    assert transfers.count == 0
    records = measured.records()
    assert transfers.count == 1
    assert [r.loss for r in records] == [float(step) for step in range(1, 33)]
    assert [r.tokens_seen for r in records] == [64 * step for step in range(1, 33)]
    assert measured.records() == []


def test_values_that_are_not_finite_are_flagged_and_written_as_none(tmp_path: Path) -> None:
    measured = meter(tmp_path)
    measured.add(1, 64, outcome(loss=math.nan, norm=2.0))
    measured.add(2, 128, outcome(loss=3.0, norm=math.inf, skipped=True))
    measured.add(3, 192, outcome())
    first, second, third = measured.records()
    assert (first.loss, first.non_finite, first.skipped) == (None, True, False)
    assert (second.loss, second.grad_norm, second.non_finite) == (3.0, None, True)
    assert second.skipped and not third.non_finite
    assert measured.skipped_steps == 1


def run_steps(measured: Meter, losses: list[float]) -> None:
    for step, loss in enumerate(losses, start=1):
        measured.add(step, 0, outcome(loss=loss))
        measured.check_finite(measured.records())


def test_too_many_non_finite_steps_in_a_row_end_the_run_and_name_the_first(tmp_path: Path) -> None:
    nan = math.nan
    with pytest.raises(NonFiniteLoss) as caught:
        run_steps(meter(tmp_path, train__max_non_finite=3), [1.0, nan, 1.0, nan, nan, nan])
    assert (caught.value.first_step, caught.value.steps) == (4, 3)


def test_non_finite_steps_with_good_ones_between_are_tolerated(tmp_path: Path) -> None:
    nan = math.nan
    run_steps(meter(tmp_path, train__max_non_finite=3), [nan, nan, 1.0] * 4)


def test_on_cpu_utilisation_is_not_applicable(tmp_path: Path) -> None:
    measured = meter(tmp_path)
    measured.add(1, 64, outcome())
    (record,) = measured.records()
    assert (record.mfu, record.hfu, record.mfu_basis) == (None, None, "n/a on cpu")


@pytest.mark.parametrize(
    ("overrides", "precision", "convention"),
    [
        ({"precision__compute": "bfloat16"}, "bfloat16", "causal"),
        ({"precision__compute": "bfloat16", "log__mfu": "palm"}, "bfloat16", "palm"),
        ({"precision__compute": "bfloat16", "precision__fp8": "true"}, "fp8", "causal"),
    ],
)
def test_utilisation_names_its_convention_and_peak(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: dict[str, str],
    precision: str,
    convention: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    peak = device_peak(small_job(tmp_path, 1, **overrides), torch.device("cuda"), world_size=2)
    h200 = lookup("NVIDIA H200")
    assert h200 is not None
    assert peak.flops_per_second == 2 * h200.peak_flops[precision]
    assert convention in peak.basis and precision in peak.basis


def test_an_unknown_device_has_an_unknown_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200 of tomorrow")
    job = small_job(tmp_path, 1, precision__compute="bfloat16")
    peak = device_peak(job, torch.device("cuda"), world_size=1)
    assert peak.flops_per_second is None
    assert peak.basis == "unknown peak: NVIDIA H200 of tomorrow in bfloat16"


def test_hardware_utilisation_counts_what_recompute_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = small_job(tmp_path, 1, memory__recompute="full")
    monkeypatch.setattr(
        "phalanx.train.measure.meter.device_peak", lambda *args: Peak(1e12, "a peak")
    )
    measured = Meter(job, CPU, StepTimer(CPU))
    measured.add(1, 64, outcome())
    (record,) = measured.records()
    flops = flops_per_token(job.model, job.data.sequence, "causal", "full")
    assert record.mfu == pytest.approx(record.tokens_per_second * flops.model_flops / 1e12)
    assert record.hfu == pytest.approx(record.mfu * flops.hardware_flops / flops.model_flops)
    assert flops.hardware_flops > flops.model_flops


def test_the_time_left_follows_recent_steps(tmp_path: Path) -> None:
    measured = meter(tmp_path, train__steps=10)
    for step in (1, 2, 3):
        measured.add(step, 0, outcome())
    first, second, third = measured.records()
    assert first.eta_seconds == pytest.approx(9 * first.step_seconds)
    assert second.eta_seconds == pytest.approx(8 * second.step_seconds)  # the first one warms up
    mean = (second.step_seconds + third.step_seconds) / 2
    assert third.eta_seconds == pytest.approx(7 * mean)


def test_a_pipeline_attributes_forward_and_backward_and_says_so(tmp_path: Path) -> None:
    job = small_job(tmp_path, 2, parallel__pipeline=2)
    timer = StepTimer(CPU)
    measured = Meter(job, CPU, timer)
    measured._world_size = 2
    with timer.phase("backward"):
        torch.ones(64, 64).sum()
    measured.add(1, 64, outcome())
    (record,) = measured.records()
    assert record.estimated == ("forward", "backward")
    assert record.parts.backward == pytest.approx(2 * record.parts.forward)
    assert record.parts.peer_wait is None


@pytest.mark.gpu
def test_on_cuda_nothing_waits_for_the_device_within_an_interval(tmp_path: Path) -> None:
    device = torch.device("cuda")
    timer = StepTimer(device)
    measured = Meter(small_job(tmp_path, 1), device, timer)
    scalar = torch.ones((), device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1, 5):
            with timer.phase("forward"):
                scalar = scalar * 1.5
            made = outcome()._replace(loss=scalar, grad_norm=scalar, skipped=scalar > 9)
            measured.add(step, 0, made)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    records = measured.records()
    assert [r.loss for r in records] == [1.5, 2.25, 3.375, 5.0625]
    assert all(0 < r.parts.forward <= r.step_seconds for r in records)


def test_the_share_of_time_spent_waiting_for_data_is_over_all_steps(tmp_path: Path) -> None:
    timer = StepTimer(CPU)
    measured = Meter(small_job(tmp_path, 1), CPU, timer)
    assert measured.data_share == 0.0
    for step in (1, 2):
        with timer.phase("data"):
            pass
        measured.add(step, 64 * step, outcome())
    records = measured.records()
    waited = sum(record.parts.data for record in records)
    assert measured.data_share == waited / sum(record.step_seconds for record in records) > 0
