"""Best-fit packing keeps every unit whole and wastes little."""

from __future__ import annotations

import numpy as np

from phalanx.data.pack.best_fit import BestFit


def pack(sizes: list[int], sequence: int, **options: int) -> list[list[int]]:
    packer = BestFit[int](sequence, **options)  # type: ignore[arg-type]
    samples = [sample for size in sizes for sample in packer.add(size, size)]
    return samples + list(packer.finish())


def test_a_unit_goes_where_it_leaves_the_least_room() -> None:
    assert pack([6, 7, 3, 4], 10) == [[7, 3], [6, 4]]
    assert pack([10, 5, 5], 10) == [[10], [5, 5]]


def test_no_unit_is_lost_or_cut_and_little_is_padding() -> None:
    sizes = np.random.default_rng(0).integers(1, 1000, 2000).tolist()
    samples = pack(sizes, 1024)
    assert sorted(size for sample in samples for size in sample) == sorted(sizes)
    assert max(map(sum, samples)) <= 1024
    assert len(samples) < 1.05 * sum(sizes) / 1024


def test_few_open_samples_bound_what_is_held() -> None:
    samples = pack([6] * 20, 10, most_open=2)
    assert samples == [[6]] * 20


def test_alone_every_unit_has_its_own_sample() -> None:
    assert pack([1, 2, 3], 10, alone=True) == [[1], [2], [3]]
