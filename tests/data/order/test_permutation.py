"""The order of samples is a bijection for every key, and epochs have nothing in common."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.order.permutation import (
    MAX_COUNT,
    Key,
    _check,
    _domain_bits,
    order_key,
    permute_many,
)

seeds = st.integers(min_value=-(2**63), max_value=2**63)
epochs = st.integers(min_value=0, max_value=2**40)


_WORD = (1 << 64) - 1


def permute(index: int, count: int, key: Key) -> int:
    """``permute_many`` for one index, written with Python's integers: slow, and plainly right."""
    _check(np.array(index), np.array(count))
    bits = _domain_bits(count)
    value = _rounds(index, bits, key)
    while value >= count:
        value = _rounds(value, bits, key)
    return value


def _rounds(value: int, bits: int, key: Key) -> int:
    low_bits = bits // 2
    high_bits = bits - low_bits
    high, low = value >> low_bits, value & ((1 << low_bits) - 1)
    for number, round_key in enumerate(key):
        if number % 2 == 0:
            high ^= _mix(low, round_key) >> (64 - high_bits)
        else:
            low ^= _mix(high, round_key) >> (64 - low_bits)
    return (high << low_bits) | low


def _mix(half: int, round_key: int) -> int:
    mixed = ((half + round_key) & _WORD) * 0x9E3779B97F4A7C15 & _WORD
    mixed ^= mixed >> 32
    return mixed * 0xD6E8FEB86659FD93 & _WORD


def order(count: int, seed: int = 0, epoch: int = 0, split: str = "train") -> list[int]:
    key = order_key(seed, split, epoch)
    return permute_many(np.arange(count), count, key).tolist()


@given(count=st.integers(1, 3000), seed=seeds, epoch=epochs)
@settings(max_examples=150, deadline=None)
def test_every_index_occurs_once(count: int, seed: int, epoch: int) -> None:
    assert sorted(order(count, seed, epoch)) == list(range(count))


@pytest.mark.parametrize("count", [1, 2, 3, 2**16 - 1, 2**16, 2**16 + 1, 1_000_000])
def test_every_index_occurs_once_at_edges_of_powers_of_two(count: int) -> None:
    seen = np.zeros(count, bool)
    seen[permute_many(np.arange(count), count, order_key(3, "train", 1))] = True
    assert seen.all()


@given(count=st.integers(1, MAX_COUNT), seed=seeds, data=st.data())
@settings(max_examples=200, deadline=None)
def test_scalar_and_array_agree_up_to_the_largest_count(
    count: int, seed: int, data: st.DataObject
) -> None:
    indices = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=8, unique=True))
    key = order_key(seed, "train", 0)
    many = permute_many(np.array(indices), count, key).tolist()
    assert many == [permute(index, count, key) for index in indices]
    assert len(set(many)) == len(indices)
    assert all(0 <= value < count for value in many)


def test_the_order_is_fixed_for_all_time() -> None:
    # A change of these numbers would make every stored cursor mean other samples.
    key = order_key(7, "train", 1)
    assert permute_many(np.arange(5), 1000, key).tolist() == [851, 594, 677, 780, 325]
    assert permute_many(np.array([123_456_789_012]), 10**12, key).tolist() == [811_436_867_185]


def test_next_epoch_is_not_the_next_seed() -> None:
    keys = {order_key(seed, "train", epoch) for seed in range(40) for epoch in range(40)}
    assert len(keys) == 1600
    assert order(100, seed=7, epoch=1) != order(100, seed=8, epoch=0)
    assert order_key(1, "train", 11) != order_key(11, "train", 1)
    assert order_key(0, "train", 0) != order_key(0, "validation", 0)


def test_epochs_agree_no_more_often_than_chance() -> None:
    count = 4096
    orders = [np.array(order(count, seed=5, epoch=epoch)) for epoch in range(12)]
    agreements = [
        int((a == b).sum()) for at, a in enumerate(orders) for b in orders[at + 1 :]
    ]  # of 66 pairs; each is Poisson with mean 1
    assert 30 < sum(agreements) < 110
    assert max(agreements) <= 8
    for at, a in enumerate(orders[1:]):
        assert abs(np.corrcoef(orders[at], a)[0, 1]) < 0.08  # five standard deviations


def test_neighbours_are_scattered() -> None:
    count = 100_000
    values = np.array(order(count))
    identity = np.arange(count)
    assert abs(np.corrcoef(values, identity)[0, 1]) < 0.016  # five standard deviations
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.016
    steps = np.diff(values)
    assert np.unique(steps, return_counts=True)[1].max() < 20  # no stride dominates
    tenths = np.histogram2d(values, identity, bins=10)[0]
    assert abs(tenths - count / 100).max() < 5 * np.sqrt(count / 100)


@pytest.mark.parametrize(("index", "count"), [(-1, 5), (5, 5), (0, 0)])
def test_an_index_outside_is_refused(index: int, count: int) -> None:
    key = order_key(0, "train", 0)
    with pytest.raises((IndexError, ValueError)):
        permute(index, count, key)
    with pytest.raises((IndexError, ValueError)):
        permute_many(np.array([index]), count, key)


@given(
    orders=st.lists(st.tuples(st.integers(1, 2**40), st.integers(0, 9)), min_size=1, max_size=9),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_each_index_may_have_a_count_and_key_of_its_own(
    orders: list[tuple[int, int]], data: st.DataObject
) -> None:
    indices = [data.draw(st.integers(0, count - 1)) for count, _ in orders]
    keys = [order_key(seed, "train", 0) for _, seed in orders]
    many = permute_many(
        np.array(indices), np.array([count for count, _ in orders]), np.array(keys, np.uint64).T
    )
    alone = zip(indices, orders, keys, strict=True)
    assert many.tolist() == [permute(index, count, key) for index, (count, _), key in alone]
