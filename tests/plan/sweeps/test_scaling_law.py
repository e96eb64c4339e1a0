"""The fit of a scaling law: known constants come back, outliers do not bend it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from phalanx.config import ConfigError
from phalanx.plan.sweeps.scaling_law import (
    LawConstants,
    ScalingPoint,
    fit_scaling_law,
    optimal,
)

TRUE = LawConstants(
    floor=1.69, size_factor=406.4, size_exponent=0.34, token_factor=410.7, token_exponent=0.28
)
SIZES = [float(10**power) for power in (7, 7.4, 7.8, 8.2, 8.6)]


def points(
    noise: float, ratios: tuple[float, ...] = (5, 20, 80), seed: int = 0
) -> list[ScalingPoint]:
    draws = np.random.default_rng(seed)
    found = []
    for size in SIZES:
        for ratio in ratios:
            tokens = size * ratio
            loss = TRUE.loss(size, tokens) * math.exp(noise * draws.standard_normal())
            found.append(
                ScalingPoint(parameters=size, tokens=tokens, flops=6 * size * tokens, loss=loss)
            )
    return found


def test_known_constants_come_back() -> None:
    fit = fit_scaling_law(points(0.0), [1e21])
    assert fit.law == "size-and-tokens" and fit.error < 1e-4
    assert fit.constants.size_exponent == pytest.approx(0.34, rel=0.02)
    assert fit.constants.token_exponent == pytest.approx(0.28, rel=0.02)
    assert fit.constants.floor == pytest.approx(1.69, rel=0.02)
    (choice,) = fit.choices
    size, tokens = optimal(TRUE, 6, 1e21)
    assert choice.parameters is not None and choice.tokens is not None
    assert choice.parameters.value == pytest.approx(size, rel=0.1)
    assert choice.tokens.value == pytest.approx(tokens, rel=0.1)
    assert 6 * choice.parameters.value * choice.tokens.value == pytest.approx(1e21)
    assert choice.loss.value == pytest.approx(TRUE.loss(size, tokens), rel=0.005)


def test_intervals_hold_the_truth_and_a_trial_that_went_wrong_moves_nothing() -> None:
    noisy = points(0.003)
    noisy[4] = ScalingPoint(
        parameters=noisy[4].parameters,
        tokens=noisy[4].tokens,
        flops=noisy[4].flops,
        loss=noisy[4].loss * 1.5,
    )
    fit = fit_scaling_law(noisy, [1e20])
    (choice,) = fit.choices
    size, tokens = optimal(TRUE, 6, 1e20)
    assert choice.parameters is not None and choice.parameters.low <= size <= choice.parameters.high
    assert choice.loss.low * 0.99 <= TRUE.loss(size, tokens) <= choice.loss.high * 1.01
    assert choice.loss.value == pytest.approx(TRUE.loss(size, tokens), rel=0.02)
    assert choice.loss.high > choice.loss.low


def test_sizes_that_grow_with_their_tokens_give_loss_against_compute_alone() -> None:
    fit = fit_scaling_law(points(0.001, ratios=(20,)), [1e20])
    assert fit.law == "compute" and "grow with the model" in fit.why_compute_alone
    (choice,) = fit.choices
    size = math.sqrt(1e20 / 120)
    assert choice.parameters is None
    assert choice.loss.value == pytest.approx(TRUE.loss(size, 20 * size), rel=0.01)


def test_too_few_trials_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 trials reported a loss"):
        fit_scaling_law(points(0.0)[:4], [1e20])
