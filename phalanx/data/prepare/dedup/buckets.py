"""Documents with equal keys, found by sorting: one band, or one range of keys of it, at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.data.prepare.words import Hashes

PAIRS_NAME = "pairs.npy"  # [2, pairs] document numbers, the smaller first, sorted

Pairs = NDArray[np.int64]


def choose_partitions(documents: int, most: int) -> int:
    """In how many ranges keys are sorted, so that each has about ``most``; a power of two."""
    return 1 << max(0, -(-documents // most) - 1).bit_length()


def select_partition(keys: Hashes, partition: int, partitions: int) -> NDArray[np.int64]:
    """Positions of the keys that fall into one of equal ranges."""
    if partitions == 1:
        return np.arange(len(keys))
    shift = np.uint64(65 - partitions.bit_length())
    return np.flatnonzero(keys >> shift == np.uint64(partition))


def equal_content(first: Hashes, second: Hashes, numbers: NDArray[np.int64]) -> Pairs:
    """(first of its kind, copy) for every document that is a copy; numbers ascend."""
    order = np.lexsort((second, first))
    one, other = first[order], second[order]
    same = (one[1:] == one[:-1]) & (other[1:] == other[:-1])
    return _sorted_pairs(_first_of_runs(numbers[order], same), numbers[order][1:], same)


def equal_keys(keys: Hashes, numbers: NDArray[np.int64]) -> Pairs:
    """Candidates: each member of a bucket with the bucket's first, and with the one before it."""
    order = np.argsort(keys, kind="stable")
    ordered, numbers = keys[order], numbers[order]
    same = ordered[1:] == ordered[:-1]
    to_first = _sorted_pairs(_first_of_runs(numbers, same), numbers[1:], same)
    to_previous = _sorted_pairs(numbers[:-1], numbers[1:], same)
    return unique_pairs([to_first, to_previous])


def unique_pairs(parts: Sequence[Pairs]) -> Pairs:
    """All pairs once, sorted."""
    pairs = np.concatenate(parts, axis=1) if parts else np.empty((2, 0), np.int64)
    pairs = pairs[:, np.lexsort((pairs[1], pairs[0]))]
    new = np.ones(pairs.shape[1], bool)
    new[1:] = (pairs[:, 1:] != pairs[:, :-1]).any(axis=0)
    return pairs[:, new]


def pairs_of(path: Path, first: int, past: int) -> Pairs:
    """Stored pairs whose smaller number lies in a range; only these are read."""
    stored = np.load(path / PAIRS_NAME, mmap_mode="r", allow_pickle=False)
    low, high = np.searchsorted(stored[0], (first, past))
    return np.array(stored[:, low:high])


def _first_of_runs(numbers: NDArray[np.int64], same: NDArray[np.bool_]) -> NDArray[np.int64]:
    """For each entry but the first, the number with which its run of equal keys begins."""
    begins = np.concatenate(([True], ~same)) if len(numbers) else np.empty(0, bool)
    at = np.maximum.accumulate(np.where(begins, np.arange(len(numbers)), 0))
    return numbers[at][1:]


def _sorted_pairs(
    one: NDArray[np.int64], other: NDArray[np.int64], wanted: NDArray[np.bool_]
) -> Pairs:
    pairs = np.stack((one[wanted], other[wanted]))
    return pairs[:, np.lexsort((pairs[1], pairs[0]))]
