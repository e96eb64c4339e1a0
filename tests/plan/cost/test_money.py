"""Cost: days, dollars, energy and carbon that follow from each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config import ConfigError
from phalanx.hardware import cluster
from phalanx.plan.cost.money import Range, bill
from phalanx.plan.question.quantities import duration, energy, mass, quantity, short, size

SPEED = Range(5e6, 6e6, 7e6)
GOODPUT = Range(0.9, 0.95, 0.97)


def test_llama3s_bill() -> None:
    # 405B: 30.84M H100 hours and 8,930 t of CO2 at TDP (Llama 3.1 model card); here 15.6T tokens
    # at 400 TFLOP/s a GPU, that is at 16,384 x 400e12 / (6 x 405e9) tokens/s.
    speed = 16384 * 400e12 / (6 * 405e9)
    found = bill(cluster("h100-16k"), 15_600_000_000_000, *(Range(x, x, x) for x in (speed, 0.9)))
    assert found.gpu_hours.mid == pytest.approx(30.84e6, rel=0.1)


def test_parts_follow_from_each_other() -> None:
    on = cluster("h100-16k")
    found = bill(on, 15_000_000_000_000, SPEED, GOODPUT, spare_gpus=96)
    assert found.gpus == 16480
    assert found.days.mid == pytest.approx(15e12 / (6e6 * 0.95) / 86400)
    assert found.gpu_hours.mid == pytest.approx(found.days.mid * 24 * 16480)
    assert found.dollars.high == pytest.approx(found.gpu_hours.high * on.price_per_gpu_hour)
    assert found.tonnes_co2.low == pytest.approx(found.megawatt_hours.low * on.carbon_kg_per_kwh)
    assert found.dollars_per_million_tokens == pytest.approx(found.dollars.mid / 15e6)


@given(st.integers(1, 10**16), st.floats(1.0, 1e9), st.floats(0.01, 1), st.integers(1, 9))
def test_twice_the_tokens_cost_twice(tokens: int, speed: float, kept: float, times: int) -> None:
    on = cluster("h200-8")
    one = bill(on, tokens, Range(speed, speed, speed), Range(kept, kept, kept))
    more = bill(on, times * tokens, Range(speed, speed, speed), Range(kept, kept, kept))
    assert more.dollars.mid == pytest.approx(times * one.dollars.mid)
    assert one.days.low == one.days.mid == one.days.high


def test_a_run_that_keeps_nothing_never_ends() -> None:
    found = bill(cluster("h200-8"), 10**9, SPEED, Range(0.0, 0.5, 0.9))
    assert found.days.mid < found.days.high == float("inf")


def test_intervals_are_ordered() -> None:
    found = bill(cluster("a100-1024"), 10**12, SPEED, GOODPUT)
    for interval in (found.days, found.gpu_hours, found.dollars, found.megawatt_hours):
        assert interval.low < interval.mid < interval.high


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("15T", 15 * 10**12),
        ("1.5t", 1_500_000_000_000),
        ("500B", 5 * 10**11),
        ("4M", 4_000_000),
        ("8k", 8000),
        ("1e12", 10**12),
        ("8_192", 8192),
        ("8,192", 8192),
    ],
)
def test_numbers_as_people_write_them(text: str, number: int) -> None:
    assert quantity(text, "tokens") == number


@pytest.mark.parametrize("text", ["", "T", "-15T", "15Q", "nan", "inf", "0", "1e30", "15 T T"])
def test_absurd_numbers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="tokens"):
        quantity(text, "tokens")


@pytest.mark.parametrize(
    ("key", "most", "binary"),
    [("tokens", 1e18, False), ("sequence", 2**24, True), ("batch", 1e12, True)],
)
def test_the_bound_that_an_error_suggests_is_accepted(key: str, most: float, binary: bool) -> None:
    with pytest.raises(ConfigError) as refused:
        quantity("9e20", key, 1, most, binary)
    (problem,) = refused.value.problems
    assert quantity(problem.fix.removeprefix("try "), key, 1, most, binary) == most


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0009987, "0.999 ms"),
        (66, "66 s"),
        (808, "13.5 min"),
        (11135, "3.09 h"),
        (2.27e6, "26.3 days"),
    ],
)
def test_durations_are_readable(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sizes_and_counts_are_readable() -> None:
    assert (size(16e12), size(25e6), short(6.596e6), short(15e12)) == (
        "16.0 TB",
        "25.0 MB",
        "6.6M",
        "15T",
    )


@pytest.mark.parametrize(
    ("megawatt_hours", "tonnes", "told"),
    [
        (28_700, 11_177, "28.7 GWh, 11,177 t"),
        (3.24, 1.26, "3.24 MWh, 1.26 t"),
        (0.0325, 0.0127, "32.5 kWh, 12.7 kg"),
    ],
)
def test_energy_and_carbon_are_told_in_units_of_their_size(
    megawatt_hours: float, tonnes: float, told: str
) -> None:
    assert f"{energy(megawatt_hours)}, {mass(tonnes)}" == told
