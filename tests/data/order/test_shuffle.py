"""Every epoch of every shuffle is a permutation; the blocked one reads few blocks at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.order.shuffle import BlockedShuffle, GlobalShuffle, Shuffle

TRILLION = 10**12


def is_permutation(values: np.ndarray, count: int) -> bool:
    seen = np.zeros(count, bool)
    seen[values] = True
    return len(values) == count and bool(seen.all())


@given(
    samples=st.integers(1, 400),
    block=st.integers(1, 50),
    window=st.integers(1, 9),
    epoch=st.integers(0, 2**20),
)
@settings(max_examples=200, deadline=None)
def test_every_epoch_gives_every_sample_once(
    samples: int, block: int, window: int, epoch: int
) -> None:
    draws = np.arange(epoch * samples, (epoch + 1) * samples)
    assert is_permutation(GlobalShuffle(3, "web", samples).indices(draws), samples)
    blocked = BlockedShuffle(3, "web", samples, block, window)
    assert is_permutation(blocked.indices(draws), samples)


@pytest.mark.parametrize(
    "shuffle",
    [GlobalShuffle(1, "s", 10**6), BlockedShuffle(1, "s", 10**6, 1009, 16)],
    ids=["global", "blocked"],
)
def test_a_million_samples_are_a_permutation_over_an_epoch_edge(shuffle: Shuffle) -> None:
    draws = shuffle.indices(np.arange(2 * 10**6))
    assert is_permutation(draws[: 10**6], 10**6)
    assert is_permutation(draws[10**6 :], 10**6)
    assert not np.array_equal(draws[: 10**6], draws[10**6 :])


@pytest.mark.parametrize(
    "shuffle",
    [GlobalShuffle(1, "s", TRILLION), BlockedShuffle(1, "s", TRILLION, 1024, 64)],
    ids=["global", "blocked"],
)
def test_a_trillion_samples_do_not_collide_where_they_are_looked_at(shuffle: Shuffle) -> None:
    places = np.concatenate([np.arange(at, at + 65_536) for at in (0, 10**11, TRILLION - 65_536)])
    scattered = np.random.default_rng(0).integers(0, TRILLION, 100_000)
    draws = np.unique(np.concatenate([places, scattered]))
    values = shuffle.indices(draws)
    assert len(np.unique(values)) == len(draws)
    assert values.min() >= 0 and values.max() < TRILLION


def test_a_draw_does_not_depend_on_what_is_drawn_with_it() -> None:
    shuffle = BlockedShuffle(5, "s", 977, 10, 4)
    together = shuffle.indices(np.arange(3000))
    alone = [int(shuffle.indices(np.array([at]))[0]) for at in range(0, 3000, 7)]
    assert together[::7].tolist() == alone


def test_the_blocked_order_reads_one_window_of_blocks_at_a_time() -> None:
    shuffle = BlockedShuffle(0, "s", samples=100_000, block_samples=100, window_blocks=8)
    blocks = shuffle.indices(np.arange(100_000)) // 100
    windows = blocks[: 100_000 // 800 * 800].reshape(-1, 800)
    assert all(len(np.unique(window)) == 8 for window in windows)
    assert sum(len(np.unique(window)) for window in windows) == len(np.unique(blocks))
    # Blocks come from everywhere, and samples of all blocks of a window are mixed.
    assert abs(np.corrcoef(windows.mean(axis=1), np.arange(len(windows)))[0, 1]) < 0.4
    assert len(np.unique(windows[3][:100])) == 8


def test_sources_seeds_and_epochs_have_orders_of_their_own() -> None:
    draws = np.arange(1000)
    orders = [
        tuple(shuffle.indices(draws + epoch * 1000).tolist())
        for seed in (0, 1)
        for source in ("web", "code")
        for epoch in (0, 1)
        for shuffle in (
            GlobalShuffle(seed, source, 1000),
            BlockedShuffle(seed, source, 1000, 10, 5),
        )
    ]
    assert len(set(orders)) == len(orders)


def test_the_orders_are_fixed_for_all_time() -> None:
    # A change of these numbers would make every stored cursor mean other samples.
    draws = np.array([0, 1, 2, 999, 1000])
    assert GlobalShuffle(7, "web", 1000).indices(draws).tolist() == [68, 167, 730, 495, 185]
    assert BlockedShuffle(7, "web", 1000, 30, 4).indices(draws).tolist() == [965, 50, 30, 785, 612]
