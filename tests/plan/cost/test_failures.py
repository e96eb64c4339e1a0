"""Failures: published rates, the best interval, goodput against a simulation, spares."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.config import ConfigError
from phalanx.hardware import cluster
from phalanx.plan.cost.failures import (
    RATES,
    FailureSettings,
    best_interval,
    cold_recovery_seconds,
    failures_per_day,
    goodput,
    mtbf_seconds,
    outlook,
    rate_named,
    spare_units,
    young_interval,
)

HOUR = 3600.0
times = st.floats(1.0, 1e6)
shares = st.floats(1e-6, 20.0)


@pytest.mark.parametrize(
    ("gpus", "rate", "hours"),
    [
        (16384, RATES["llama3"].per_1000_node_days, 3.093),
        (16384, 6.5, 1.803),
        (1024, 6.5, 28.85),
    ],
)
def test_published_rates_give_published_times(gpus: int, rate: float, hours: float) -> None:
    assert mtbf_seconds(gpus, rate) / HOUR == pytest.approx(hours, rel=1e-3)


def test_llama3_is_3_79_per_1000_node_days() -> None:
    assert RATES["llama3"].per_1000_node_days == pytest.approx(3.79, abs=0.005)


def test_domains_make_98k_gpus_fail_every_18_minutes_2_8_times_as_often_as_linear() -> None:
    rate = RATES["rsc-2"].per_1000_node_days
    assert mtbf_seconds(98304, rate) / 60 == pytest.approx(18, rel=0.01)
    linear = mtbf_seconds(98304, rate, correlated=False)
    assert linear / mtbf_seconds(98304, rate) == pytest.approx(2.8, rel=0.01)


@given(st.integers(8, 500_000), st.floats(0.1, 50))
def test_failures_are_linear_up_to_32k_and_worse_above(gpus: int, rate: float) -> None:
    linear, real = (failures_per_day(gpus, rate, correlated) for correlated in (False, True))
    assert real == linear if gpus <= 32768 else real > linear
    assert failures_per_day(gpus + 8, rate) > real


def test_cold_recovery_meets_the_published_points_and_grows_between() -> None:
    assert [cold_recovery_seconds(n) for n in (16384, 65536, 98304)] == pytest.approx(
        [200, 600, 900]
    )
    sizes = [8, 1024, 8192, 16384, 32768, 65536, 80000, 98304, 200_000]
    found = [cold_recovery_seconds(n) for n in sizes]
    assert found == sorted(found)


@given(times, shares)
def test_the_best_interval_is_a_maximum(mtbf: float, share: float) -> None:
    stall = share * mtbf
    best = best_interval(mtbf, stall)
    top = goodput(mtbf, best, stall, 0.0)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert goodput(mtbf, best * factor, stall, 0.0) <= top * (1 + 1e-9)


@given(times)
def test_young_is_right_where_the_interval_is_small_and_too_long_where_not(mtbf: float) -> None:
    small, large = 1e-6 * mtbf, mtbf
    assert best_interval(mtbf, small) == pytest.approx(young_interval(mtbf, small), rel=2e-3)
    assert best_interval(mtbf, large) < 0.7 * young_interval(mtbf, large)


@given(times, st.floats(1e-4, 5), st.floats(0, 5), st.floats(0, 5))
def test_goodput_is_a_share_and_falls_with_every_cost(
    mtbf: float, interval: float, stall: float, recovery: float
) -> None:
    arguments = (mtbf, interval * mtbf, stall * mtbf, recovery * mtbf)
    kept = goodput(*arguments)
    assert 0 < kept < 1
    assert goodput(mtbf, interval * mtbf, stall * mtbf * 1.5 + 1, recovery * mtbf) < kept
    assert goodput(mtbf, interval * mtbf, stall * mtbf, recovery * mtbf * 1.5 + 1) < kept
    assert goodput(2 * mtbf, *arguments[1:]) > kept


def test_the_linear_form_agrees_where_times_are_short() -> None:
    mtbf, interval, stall, recovery = 11135.0, 60.0, 0.2, 260.0
    linear = (1 - (recovery + interval / 2) / mtbf) / (1 + stall / interval)
    assert linear == pytest.approx(goodput(mtbf, interval, stall, recovery), abs=5e-4)


def test_a_cluster_that_fails_faster_than_it_recovers_keeps_nothing() -> None:
    assert goodput(1.0, 1.0, 0.1, 1e6) == 0.0
    assert goodput(1.0, 1e6, 0.1, 1.0) == 0.0


def test_goodput_is_what_a_simulated_run_keeps() -> None:
    mtbf, interval, stall, recovery = 1000.0, 300.0, 40.0, 500.0
    dice = random.Random(7)
    clock = kept = 0.0
    while kept < 4000 * interval:
        failure = dice.expovariate(1 / mtbf)
        segments, rest = divmod(failure, interval + stall)
        kept += segments * interval
        clock += segments * (interval + stall) + rest
        while (again := dice.expovariate(1 / mtbf)) < recovery:
            clock += again
        clock += recovery
    assert kept / clock == pytest.approx(goodput(mtbf, interval, stall, recovery), rel=0.03)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3000), st.floats(1e-5, 0.2), st.floats(0.5, 0.999))
def test_spares_are_the_fewest_that_suffice(units: int, down: float, quantile: float) -> None:
    spares = spare_units(units, down, quantile)
    assert _whole(units, spares, down) >= quantile
    assert spares == 0 or _whole(units, spares - 1, down) < quantile


def test_spares_of_a_very_large_fleet_do_not_underflow() -> None:
    assert 10_000 < spare_units(1_000_000, 0.01, 0.99) < 10_600


def test_an_outlook_holds_together() -> None:
    found = outlook(cluster("h100-16k"), 12 * 405e9)
    assert found.mtbf_seconds / HOUR == pytest.approx(3.09, abs=0.01)
    assert found.goodput_low < found.goodput < found.goodput_high < 1
    assert found.goodput > 0.9  # Llama 3: above 90 %
    assert found.spares[0].spares == 12


def test_100k_gpus_that_restart_cold_lose_most_of_their_time() -> None:
    # Fault Tolerant HSDP on 100,000 GPUs (2026) reports 44 % with synchronous recovery.
    rate = FailureSettings(rate=RATES["rsc-2"])
    slow = outlook(cluster("h100-98304"), 12e12, rate)
    fast = outlook(cluster("h100-98304"), 12e12, FailureSettings(recovery_seconds=30.0))
    assert slow.goodput == pytest.approx(0.44, abs=0.05)
    assert fast.goodput > 0.8


def test_spares_stand_in_pods_and_in_nvlink_domains() -> None:
    llama = outlook(cluster("llama3-16384"), 5e12)
    rack = outlook(cluster("gb200-nvl72-4608"), 5e12)
    assert [row.domain for row in llama.spares] == ["node", "node, in each of 6 pods"]
    assert [row.gpus_per_unit for row in rack.spares] == [4, 72]
    assert rack.spares[1].gpus > rack.spares[0].gpus


def test_rates_by_name_or_number() -> None:
    assert rate_named("RSC-1").per_1000_node_days == 6.5
    assert rate_named("4.2").per_1000_node_days == 4.2
    for wrong, said in (("rsc1", "rsc-1"), ("-3", "above 0"), ("nan", "above 0")):
        with pytest.raises(ConfigError, match=said):
            rate_named(wrong)


def _whole(units: int, spares: int, down: float) -> float:
    total = units + spares
    return sum(
        math.exp(
            math.lgamma(total + 1)
            - math.lgamma(k + 1)
            - math.lgamma(total - k + 1)
            + k * math.log(down)
            + (total - k) * math.log1p(-down)
        )
        for k in range(spares + 1)
    )


def test_times_and_probabilities_that_cannot_be_are_refused() -> None:
    for mtbf, stall in ((0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, -1.0), (1.0, math.inf)):
        with pytest.raises(ConfigError, match="seconds"):
            best_interval(mtbf, stall)
        with pytest.raises(ConfigError, match="seconds"):
            young_interval(mtbf, stall)
    for probability, quantile in ((1.0, 0.99), (-0.1, 0.99), (0.1, 1.0), (0.1, 0.0)):
        with pytest.raises(ConfigError, match="must be"):
            spare_units(100, probability, quantile)


def test_a_job_that_never_fails_needs_no_checkpoint_and_no_spare() -> None:
    assert best_interval(math.inf, 1.0) == math.inf
    assert spare_units(1000, 0.0, 0.99) == 0
