"""Random streams: a function of seed, purpose and counter, and of nothing else."""

from __future__ import annotations

import math

from phalanx.simulate.draws import SeedDraws


def test_a_stream_does_not_depend_on_what_others_drew() -> None:
    quiet, busy = SeedDraws(7), SeedDraws(7)
    other = busy.stream("repair")
    for _ in range(1000):
        other.uniform()
    assert [quiet.stream("fault").bits() for _ in range(3)] == [
        busy.stream("fault").bits() for _ in range(3)
    ]


def test_thing_number_i_has_the_same_luck_whatever_came_before() -> None:
    first, second = SeedDraws(1).stream("fault"), SeedDraws(1).stream("fault")
    for number in range(50):
        first.at(number).uniform()
    assert first.at(12).uniform() == second.at(12).uniform()


def test_seeds_purposes_and_things_differ() -> None:
    values = {
        SeedDraws(seed).stream(name).at(number).bits()
        for seed in range(10)
        for name in ("a", "b", "ab")
        for number in range(10)
    }
    assert len(values) == 300


def test_draws_have_the_distribution_they_claim() -> None:
    stream = SeedDraws(3).stream("moments")
    count = 40_000
    uniform = [stream.uniform() for _ in range(count)]
    waits = [stream.exponential(5.0) for _ in range(count)]
    normal = [stream.normal() for _ in range(count)]
    bins = [0] * 6
    for _ in range(count):
        bins[stream.below(6)] += 1
    tolerance = 5 / math.sqrt(count)
    assert abs(sum(uniform) / count - 0.5) < 0.29 * tolerance
    assert abs(sum(waits) / count - 5) < 5 * tolerance
    assert abs(sum(normal) / count) < tolerance
    assert abs(sum(x * x for x in normal) / count - 1) < 1.5 * tolerance
    assert all(abs(share / count - 1 / 6) < 0.38 * tolerance for share in bins)


def test_a_spread_factor_keeps_the_mean() -> None:
    stream = SeedDraws(4).stream("factor")
    for sigma in (0.0, 0.5, 1.0):
        factors = [stream.factor(sigma) for _ in range(40_000)]
        deviation = math.sqrt(math.exp(sigma**2) - 1)
        assert abs(sum(factors) / len(factors) - 1) <= 5 * deviation / 200 + 1e-12
