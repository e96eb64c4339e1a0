"""Groups of documents that say the same: of each, the first stays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phalanx.data.prepare.dedup.buckets import Pairs


def copies(pairs: Pairs) -> Pairs:
    """(number, first of its group) of every document but the first of each group, sorted."""
    members, ends = np.unique(pairs, return_inverse=True)
    one, other = ends.reshape(2, -1)
    labels = np.arange(len(members))
    while True:
        lowest = np.minimum(labels[one], labels[other])
        after = labels.copy()
        for target in (one, other, labels[one], labels[other]):
            np.minimum.at(after, target, lowest)
        while not np.array_equal(shortened := after[after], after):
            after = shortened
        if np.array_equal(after, labels):
            break
        labels = after
    extra = np.flatnonzero(labels != np.arange(len(members)))
    return np.stack((members[extra], members[labels[extra]]))


def in_range(numbers: NDArray[np.int64], first: int, past: int) -> NDArray[np.int64]:
    """Those of sorted numbers that lie in a range, counted from its beginning."""
    low, high = np.searchsorted(numbers, (first, past))
    return np.asarray(numbers[low:high]) - first
