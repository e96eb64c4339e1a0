"""Synthetic tokens are a pure, well spread function of seed and index."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from phalanx.config import Data
from phalanx.data import DataError, Feed, SyntheticSource


def read(source: SyntheticSource, index: int) -> NDArray[np.int64]:
    out = np.empty(source.sequence + 1, np.int64)
    source.read([index], [out])
    return out


def test_a_sample_depends_on_seed_and_index_alone() -> None:
    source = SyntheticSource(vocab=1000, sequence=64, seed=7)
    first = read(source, 5)
    read(source, 6)
    assert np.array_equal(first, read(source, 5))
    assert np.array_equal(first, read(SyntheticSource(1000, 64, seed=7), 5))
    assert not np.array_equal(first, read(source, 6))
    assert not np.array_equal(first, read(SyntheticSource(1000, 64, seed=8), 5))
    assert not np.array_equal(read(source, 8), read(SyntheticSource(1000, 64, seed=8), 7))


def test_the_tokens_are_fixed_for_all_time() -> None:
    assert read(SyntheticSource(128256, 5, seed=1), 2).tolist() == [
        39671,
        45781,
        4733,
        123369,
        2436,
        54891,
    ]


def test_tokens_cover_the_vocabulary_evenly() -> None:
    tokens = read(SyntheticSource(vocab=100, sequence=100_000, seed=0), 0)
    counts = np.bincount(tokens, minlength=100)
    assert len(counts) == 100
    assert abs(counts - 1000).max() < 5 * np.sqrt(1000)


def test_labels_are_the_tokens_that_follow() -> None:
    feed = Feed(Data(sequence=32, prefetch=0), 1000, 2, 2, 0, 1)
    batch = feed.next(feed.start()).micro_batches[0]
    assert batch.tokens.shape == batch.labels.shape == (2, 32)
    assert batch.tokens.dtype == batch.labels.dtype == np.int64
    assert np.array_equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    assert batch.documents is None


def test_a_negative_seed_is_as_good_as_another() -> None:
    assert not np.array_equal(
        read(SyntheticSource(1000, 16, seed=-1), 0), read(SyntheticSource(1000, 16, seed=1), 0)
    )


def test_an_empty_vocabulary_is_refused() -> None:
    with pytest.raises(DataError, match=r"model\.vocab = 0"):
        SyntheticSource(vocab=0, sequence=16, seed=0)
