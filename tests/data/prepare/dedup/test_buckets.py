"""Equal keys are found by sorting, in one piece or by partitions, always the same pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from phalanx.data.prepare.dedup.buckets import (
    PAIRS_NAME,
    choose_partitions,
    equal_content,
    equal_keys,
    pairs_of,
    select_partition,
    unique_pairs,
)
from phalanx.data.prepare.words import mix


def as_set(pairs: np.ndarray) -> set[tuple[int, int]]:  # type: ignore[type-arg]
    return {(int(one), int(other)) for one, other in pairs.T}


def test_members_of_a_bucket_are_paired_with_its_first_and_their_neighbour() -> None:
    keys = np.array([5, 9, 5, 7, 5, 9], np.uint64)
    pairs = equal_keys(keys, np.arange(10, 16))
    assert pairs.tolist() == [[10, 10, 11, 12], [12, 14, 15, 14]]


def test_content_must_be_equal_in_both_halves() -> None:
    first = np.array([1, 1, 1, 2, 1], np.uint64)
    second = np.array([8, 9, 8, 8, 8], np.uint64)
    assert as_set(equal_content(first, second, np.arange(5))) == {(0, 2), (0, 4)}


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_and_a_single_document_have_no_pairs(count: int) -> None:
    keys, numbers = np.zeros(count, np.uint64), np.arange(count)
    assert equal_keys(keys, numbers).shape == (2, 0)
    assert equal_content(keys, keys, numbers).shape == (2, 0)


@pytest.mark.parametrize("partitions", [1, 2, 4, 8])
def test_partitions_together_find_what_one_sort_finds(partitions: int) -> None:
    keys = mix(np.random.default_rng(3).integers(0, 300, 1000).astype(np.uint64))
    whole = equal_keys(keys, np.arange(1000))
    parts = []
    for partition in range(partitions):
        chosen = select_partition(keys, partition, partitions)
        parts.append(equal_keys(keys[chosen], chosen))
    assert (unique_pairs(parts) == whole).all()


def test_partitions_bound_what_is_sorted_at_once() -> None:
    assert [choose_partitions(count, 100) for count in (0, 100, 101, 200, 201, 400, 801)] == [
        *(1, 1, 2, 2, 4, 4, 16)
    ]


def test_stored_pairs_are_read_by_range(tmp_path: Path) -> None:
    np.save(tmp_path / PAIRS_NAME, np.array([[1, 1, 4, 7], [2, 9, 5, 8]]))
    assert pairs_of(tmp_path, 1, 5).tolist() == [[1, 1, 4], [2, 9, 5]]
    assert pairs_of(tmp_path, 5, 7).shape == (2, 0)
