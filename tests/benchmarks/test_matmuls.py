"""Which matmuls are timed, and how the fastest is found; the device is played."""

from __future__ import annotations

import pytest
import torch

from benchmarks.matmuls import IN_FP8, LONG, SHAPES, Result, in_bf16, matrices, problems, time_all
from phalanx.config import PRESETS
from phalanx.model import make_model
from phalanx.model.cuda import cublaslt


@pytest.mark.parametrize("preset", SHAPES)
def test_a_block_has_the_matrices_that_are_timed(preset: str) -> None:
    with torch.device("meta"):
        block = make_model(PRESETS[preset], range(1), embed=False, head=False).layers["0"]
    shapes = [tuple(each.shape) for each in block.parameters() if each.ndim == 2]
    assert sorted(shapes) == sorted(matrices(preset))


def test_each_problem_is_timed_once_and_large_enough_to_be_chosen() -> None:
    found = problems()
    linear = 4 * (len(SHAPES) + len(IN_FP8))
    assert len({problem.text for problem in found}) == len(found) <= 3 * (linear + len(SHAPES))
    for p in found:
        assert 2 * p.rows * p.columns * p.inner >= cublaslt.SMALLEST, p
        assert all(size % 16 == 0 for size in (p.rows, p.columns, p.inner)), p


def test_the_three_matmuls_of_a_layer_are_those_of_its_backward() -> None:
    forward, of_input, of_weight = in_bf16(64, 32, 16)
    x, weight, slope = torch.empty(64, 16), torch.empty(32, 16), torch.empty(64, 32)
    assert cublaslt.shape_of(x, weight, False, True) == forward[:3]
    assert cublaslt.shape_of(slope, weight, False, False) == of_input[:3]
    assert cublaslt.shape_of(slope, x, True, False) == of_weight[:3]


class Device:
    """Algorithms whose time grows while the card becomes warm."""

    def __init__(self, cold: list[float], warm: list[float]) -> None:
        self.cold, self.warm, self.now = cold, warm, 0.0

    def seconds_of(self, number: int, runs: int) -> float:
        seconds = (self.cold if self.now < 1.0 else self.warm)[number]
        self.now += runs * seconds
        return seconds


def test_what_is_fastest_under_load_wins() -> None:
    device = Device([1e-3, 0.9e-3, 1.1e-3], [2e-3, 2.2e-3, 1.5e-3])
    found = time_all(3, device.seconds_of, 10.0, lambda: device.now)
    (problem, *_) = problems()
    result = Result(problem, found)
    assert (result.best, result.gain) == (2, pytest.approx(2 / 1.5))


def test_a_gain_within_the_noise_keeps_the_librarys_choice() -> None:
    (problem, *_) = problems()
    assert Result(problem, {0: 1.005, 3: 1.0}).best == 0


def test_a_spent_budget_still_times_the_librarys_choice_and_the_best() -> None:
    device = Device([1e-3] * 40, [1e-3] * 40)
    device.cold[30] = 0.5e-3
    found = time_all(40, device.seconds_of, 0.0, lambda: device.now)
    assert len(found) == LONG and {0, 30} <= found.keys()
