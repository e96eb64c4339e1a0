"""Two ways to shuffle a source: over all its samples, or over blocks that stay together.

Both map ordinal n of a source (its n-th sample ever drawn, over all epochs) to a sample of its
stream in O(1) time and memory; every epoch is a permutation of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.data.order.permutation import Key, Keys, order_key, permute_many

Numbers = NDArray[np.int64]


class Shuffle(Protocol):
    """The order in which the samples of one source are drawn."""

    def indices(self, ordinals: Numbers) -> Numbers:
        """Samples of the source that its draws number ``ordinals`` give."""


class GlobalShuffle:
    """Any sample may follow any other: for files that are mapped or read at random cheaply."""

    def __init__(self, seed: int, source: str, samples: int) -> None:
        self._seed, self._source, self._samples = seed, source, samples

    def indices(self, ordinals: Numbers) -> Numbers:
        """Samples of the source that its draws number ``ordinals`` give."""
        epochs, positions = np.divmod(ordinals, self._samples)
        keys = _keys(epochs, lambda epoch: order_key(self._seed, self._source, epoch))
        return permute_many(positions, self._samples, keys)


class BlockedShuffle:
    """Blocks of neighbouring samples in random order, then samples within windows of blocks.

    While a window is drawn from, only its blocks are read: a store sees long ranges. Windows
    have ``window_blocks`` blocks or up to twice as many, so that none is left small; samples
    that fill no block belong to the last window of each epoch.
    """

    def __init__(
        self, seed: int, source: str, samples: int, block_samples: int, window_blocks: int
    ) -> None:
        self._seed, self._source, self._samples = seed, source, samples
        self.block_samples = min(block_samples, samples)
        self._blocks = samples // self.block_samples
        self._windows = max(1, self._blocks // window_blocks)

    def indices(self, ordinals: Numbers) -> Numbers:
        """Samples of the source that its draws number ``ordinals`` give."""
        size, blocks, windows = self.block_samples, self._blocks, self._windows
        epochs, positions = np.divmod(ordinals, self._samples)
        drawn = np.minimum(positions // size, blocks - 1)
        window = ((drawn + 1) * windows - 1) // blocks  # of evenly divided blocks
        first = window * blocks // windows * size
        past = np.where(
            window == windows - 1, self._samples, (window + 1) * blocks // windows * size
        )
        keys = _keys(epochs * windows + window, self._window_key)
        places: Numbers = first + permute_many(positions - first, past - first, keys)
        whole = places < blocks * size
        block_keys = _keys(epochs[whole], self._block_key)
        order = permute_many(places[whole] // size, blocks, block_keys)
        places[whole] = order * size + places[whole] % size
        return places

    def _window_key(self, number: int) -> Key:
        epoch, window = divmod(number, self._windows)
        return order_key(self._seed, self._source, epoch, "window", window)

    def _block_key(self, epoch: int) -> Key:
        return order_key(self._seed, self._source, epoch, "blocks")


def _keys(groups: Numbers, key: Callable[[int], Key]) -> Key | Keys:
    """A key for each index, derived once for each group; neighbours mostly share theirs."""
    if groups.size == 0 or (groups == groups[0]).all():
        return key(int(groups[0]) if groups.size else 0)
    different, which = np.unique(groups, return_inverse=True)
    return np.array([key(group) for group in different.tolist()], np.uint64).T[:, which]
