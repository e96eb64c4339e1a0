"""Weights hold over every prefix of a blend, exactly over its cycle."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.order.blend import LONGEST_CYCLE, Blend, arrange, quotas

weights = st.lists(
    st.one_of(
        st.just(0.0),
        st.integers(1, 1000).map(lambda n: n / 100),
        st.floats(0.001, 10).map(lambda w: round(w, 6)),
    ),
    min_size=1,
    max_size=24,
).filter(lambda found: sum(found) > 0)


def test_decimal_weights_are_kept_exactly() -> None:
    assert quotas([0.7, 0.2, 0.1]) == (7, 2, 1)
    assert quotas([3, 1, 0]) == (3, 1, 0)
    assert quotas([1]) == (1,)
    assert sum(quotas([0.123, 0.456, 0.421])) == 1000


@given(weights=weights)
@settings(max_examples=60, deadline=None)
def test_quotas_are_the_nearest_whole_shares(weights: list[float]) -> None:
    found = quotas(weights)
    total = sum(Fraction(str(weight)) for weight in weights)
    length = sum(found)
    assert length <= LONGEST_CYCLE
    for weight, quota in zip(weights, found, strict=True):
        assert (quota > 0) == (weight > 0)
        assert abs(quota - float(Fraction(str(weight)) / total * length)) <= 1


def test_many_rare_sources_get_a_sample_each_and_the_common_one_gives_way() -> None:
    found = quotas([1.0, *[1e-7] * 30])
    assert found[1:] == (1,) * 30 and sum(found) == LONGEST_CYCLE


@given(weights=weights)
@settings(max_examples=60, deadline=None)
def test_every_prefix_is_within_two_samples_of_the_weights(weights: list[float]) -> None:
    shares = quotas(weights)
    cycle = arrange(shares)
    assert np.bincount(cycle, minlength=len(shares)).tolist() == list(shares)
    seen = np.arange(1, len(cycle) + 1)
    for source, share in enumerate(shares):
        off = np.cumsum(cycle == source) - seen * (share / len(cycle))
        assert np.abs(off).max() < 2


@pytest.mark.parametrize("others", [3, 40, 99])
def test_equal_rare_sources_do_not_come_all_at_once(others: int) -> None:
    cycle = arrange(quotas([0.9, *[0.1 / others] * others]))
    common = np.cumsum(cycle == 0) - np.arange(1, len(cycle) + 1) * (cycle == 0).mean()
    assert np.abs(common).max() < 2


@given(weights=weights, first=st.integers(0, 10**15))
@settings(max_examples=60, deadline=None)
def test_random_access_agrees_with_counting(weights: list[float], first: int) -> None:
    blend = Blend(weights)
    sources, ordinals = blend.locate(np.arange(first, first + 300))
    counts = blend.counts(first)
    for source, ordinal in zip(sources.tolist(), ordinals.tolist(), strict=True):
        assert ordinal == counts[source]
        counts[source] += 1
    assert counts.tolist() == blend.counts(first + 300).tolist()


@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], []])
def test_weights_that_mean_nothing_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        Blend(weights)
