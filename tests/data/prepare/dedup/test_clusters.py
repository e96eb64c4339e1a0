"""Of documents that say the same, the first stays."""

from __future__ import annotations

import random

import numpy as np
import pytest

from phalanx.data.prepare.dedup.clusters import copies, in_range


def by_hand(pairs: list[tuple[int, int]]) -> dict[int, int]:
    groups: dict[int, set[int]] = {}
    for one, other in pairs:
        joined = groups.get(one, {one}) | groups.get(other, {other})
        for member in joined:
            groups[member] = joined
    return {each: min(group) for each, group in groups.items() if each != min(group)}


@pytest.mark.parametrize("seed", range(20))
def test_groups_are_those_of_a_plain_search(seed: int) -> None:
    rng = random.Random(seed)
    pairs = [tuple(sorted(rng.sample(range(60), 2))) for _ in range(rng.randint(1, 50))]
    found = copies(np.array(pairs).T)
    assert dict(zip(*found.tolist(), strict=True)) == by_hand(pairs)  # type: ignore[arg-type]
    assert (np.diff(found[0]) > 0).all()


def test_a_long_chain_is_one_group() -> None:
    chain = np.stack((np.arange(1000), np.arange(1, 1001)))
    assert (copies(chain[:, np.random.default_rng(0).permutation(1000)])[1] == 0).all()


def test_no_pairs_no_copies() -> None:
    assert copies(np.empty((2, 0), np.int64)).shape == (2, 0)


def test_numbers_of_a_file_are_counted_from_its_beginning() -> None:
    assert in_range(np.array([2, 5, 7, 11]), 5, 11).tolist() == [0, 2]
