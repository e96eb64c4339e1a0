"""Clipping and the decision to skip: the right verdict, and never a host read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.config import Optimizer, Precision
from phalanx.parallel import LossScale, Weight
from phalanx.train.optim.guard import (
    MEAN_DECAY,
    MOST_SPIKES,
    SPIKE_MEANS,
    WARMUP_STEPS,
    GradientVerdict,
    Guard,
    squared_norm,
)
from phalanx.train.optim.optimizer import build_optimizer
from tests.train.host_reads import no_host_reads

CPU = torch.device("cpu")
ONE = torch.tensor(1.0)


def guard(*, always_finite: bool = False, **settings: Any) -> Guard:
    return Guard(Optimizer(**settings), CPU, always_finite=always_finite)


def judged(watcher: Guard, norm: float, loss_scale: float = 1.0) -> GradientVerdict:
    """The verdict on one step, made without a host read."""
    value, scale = torch.tensor(norm), torch.tensor(loss_scale)
    with no_host_reads():
        verdict = watcher.judge(value, scale)
    assert all(isinstance(part, Tensor) and part.shape == () for part in verdict)
    return verdict


def skips(watcher: Guard, norms: list[float]) -> list[bool]:
    """Which steps of a long run are skipped; host reads are not watched, which takes long."""
    return [bool(watcher.judge(torch.tensor(norm), ONE).skip) for norm in norms]


def test_watching_for_host_reads_notices_them() -> None:
    x = torch.arange(3.0)
    for read in (
        lambda: x[0].item(),
        lambda: x.tolist(),
        lambda: bool(x[0] > 0),
        lambda: torch.tensor([1.0, 2.0]),
        lambda: x.nonzero(),
        lambda: torch.equal(x, x),
    ):
        with pytest.raises(AssertionError), no_host_reads():
            read()


@pytest.mark.parametrize(
    ("norm", "clip", "expected"),
    [(0.5, 1.0, 1.0), (4.0, 1.0, 0.25), (4.0, 2.0, 0.5), (4.0, 0.0, 1.0), (0.0, 1.0, 1.0)],
)
def test_gradients_are_scaled_down_to_the_clip_norm(
    norm: float, clip: float, expected: float
) -> None:
    verdict = judged(guard(clip_norm=clip), norm)
    assert verdict.multiplier.item() == pytest.approx(expected, rel=1e-5)
    assert not verdict.skip and not verdict.overflowed


def test_the_loss_scale_is_taken_out_beside_clipping() -> None:
    assert judged(guard(), 4.0, loss_scale=1024.0).multiplier.item() == pytest.approx(
        0.25 / 1024, rel=1e-5
    )


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_skips_the_step(norm: float) -> None:
    verdict = judged(guard(), norm)
    assert verdict.skip and verdict.overflowed


def test_it_does_not_when_told_so_unless_the_format_overflows_by_design() -> None:
    told = judged(guard(skip_non_finite=False), math.inf)
    assert told.overflowed and not told.skip
    assert judged(guard(skip_non_finite=False, always_finite=True), math.inf).skip


def test_a_spike_is_judged_only_after_the_warm_up() -> None:
    watcher = guard(spike_factor=3.0)
    assert not any(skips(watcher, [100.0 if step == 5 else 1.0 for step in range(WARMUP_STEPS)]))
    settled = watcher.mean.item()
    assert not judged(watcher, 2.9 * settled).skip
    assert judged(watcher, 3.5 * settled).skip


def test_spikes_are_never_skipped_when_the_factor_is_zero() -> None:
    watcher = guard(spike_factor=0.0)
    assert not any(skips(watcher, [1.0] * (WARMUP_STEPS + 1)))
    assert not judged(watcher, 1e9).skip


def settled(**settings: Any) -> Guard:
    watcher = guard(**settings)
    skips(watcher, [1.0] * WARMUP_STEPS)
    assert watcher.mean.item() == pytest.approx(1.0)
    return watcher


def test_the_running_mean_forgets_slowly_and_ignores_what_is_no_number() -> None:
    watcher = settled(spike_factor=2.0)
    before = watcher.good_steps.item()
    for bad in (math.nan, math.inf):
        assert judged(watcher, bad).skip
    assert watcher.mean.item() == pytest.approx(1.0) and watcher.good_steps.item() == before
    judged(watcher, 1.5)
    assert watcher.mean.item() == pytest.approx(MEAN_DECAY + (1 - MEAN_DECAY) * 1.5)


@pytest.mark.parametrize(("factor", "counted"), [(2.0, 2.0), (50.0, SPIKE_MEANS)])
def test_a_spike_enters_the_mean_cut_down(factor: float, counted: float) -> None:
    watcher = settled(spike_factor=factor)
    assert judged(watcher, 1e6).skip
    assert watcher.mean.item() == pytest.approx(MEAN_DECAY + (1 - MEAN_DECAY) * counted)
    assert judged(watcher, 1e6).skip and not judged(watcher, 1.0).skip


@pytest.mark.parametrize("factor", [1.5, 3.0, 10.0])
@pytest.mark.parametrize("level", [20.0, 1e3, 1e9])
def test_norms_that_stay_high_are_skipped_a_few_times_and_then_are_the_level(
    factor: float, level: float
) -> None:
    watcher = settled(spike_factor=factor)
    skipped = skips(watcher, [level] * 500)
    assert skipped[0] and not any(skipped[MOST_SPIKES:])
    assert judged(watcher, 2 * factor * level).skip  # and spikes are known again


def test_a_good_step_between_spikes_begins_their_count_anew() -> None:
    watcher = settled(spike_factor=100.0)
    for _ in range(5):
        assert all(skips(watcher, [1e9] * (MOST_SPIKES - 1)))
        assert not judged(watcher, 1.0).skip


def test_every_second_step_is_not_skipped_for_ever() -> None:
    watcher = settled(spike_factor=3.0)
    skipped = skips(watcher, [1.0, 51.0] * 500)
    assert any(skipped) and not any(skipped[500:])


def test_a_guard_of_an_earlier_version_goes_on() -> None:
    watcher = settled(spike_factor=3.0)
    watcher.good_steps.fill_(5000.0)  # all good steps of the run
    assert sum(skips(watcher, [100.0] * 100)) == MOST_SPIKES


def test_a_step_without_labels_is_skipped_and_teaches_nothing() -> None:
    watcher = settled(spike_factor=2.0)
    before = watcher.good_steps.item()
    norm, empty = torch.tensor(0.0), torch.tensor(True)
    with no_host_reads():
        verdict = watcher.judge(norm, ONE, empty)
    assert verdict.skip and not verdict.overflowed
    assert watcher.mean.item() == pytest.approx(1.0) and watcher.good_steps.item() == before


def test_bad_steps_do_not_shorten_the_warm_up() -> None:
    watcher = guard(spike_factor=2.0)
    skips(watcher, [math.nan] * WARMUP_STEPS)
    judged(watcher, 1.0)
    assert not judged(watcher, 100.0).skip


def made(name: str, gradient: Tensor, copies: int) -> Weight:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return Weight(name, parameter, parameter.detach(), copies)


def test_the_squared_norm_counts_shared_blocks_once() -> None:
    """Ranks add their shares: a block that four ranks hold must count a quarter on each."""
    gradients = [torch.full((3, 2), 2.0), torch.full((5,), -1.0), torch.empty(0)]
    weights = [
        made(name, g, copies) for name, g, copies in zip("abc", gradients, (1, 4, 2), strict=True)
    ]
    with no_host_reads():
        found = squared_norm(weights)
    assert found.item() == pytest.approx(24.0 + 5.0 / 4)


def test_the_squared_norm_of_bf16_gradients_is_summed_in_fp32() -> None:
    gradient = torch.full((10_000,), 0.01, dtype=torch.bfloat16)
    expected = gradient.double().square().sum().item()
    assert squared_norm([made("a", gradient, 1)]).item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_update_reads_nothing_on_the_host(kind: str) -> None:
    weights = [made("layers.0.mlp.down.weight", torch.randn(4, 6), 1), made("x", torch.ones(4), 1)]
    optimizer = build_optimizer(weights, Optimizer(kind=kind), offload=False)  # type: ignore[arg-type]
    watcher = guard(spike_factor=2.0)
    scale = LossScale(Precision(compute="float16"), CPU)
    with no_host_reads():
        verdict = watcher.judge(squared_norm(weights).sqrt(), scale.value)
        optimizer.step(0.01, verdict)
        scale.update(verdict.overflowed)
    assert weights[0].master.abs().sum() > 0
