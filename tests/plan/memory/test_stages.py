"""Layers are split over stages so that the costliest stage is as cheap as it can be."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from phalanx.config import PRESETS, MultiTokenPrediction
from phalanx.plan.memory.stages import (
    StageSplitter,
    _rank_layers,
    rank_layers,
    rank_stages,
    stage_layers,
)
from phalanx.plan.workload import Software, Workload


def worst(costs: list[int], first: int, last: int, cuts: tuple[int, ...]) -> int:
    edges = (0, *cuts, len(costs))
    sums = [sum(costs[a:b]) for a, b in pairwise(edges)]
    sums[0] += first
    sums[-1] += last
    return max(sums)


@given(
    costs=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    first=st.integers(0, 5),
    last=st.integers(0, 12),
    data=st.data(),
)
def test_no_other_cut_is_better(
    costs: list[int], first: int, last: int, data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    split = StageSplitter(costs, first, last).split(stages)
    assert [layer for part in split for layer in part] == list(range(len(costs)))
    assert all(split), "every stage has a layer"
    every = combinations(range(1, len(costs)), stages - 1)
    best = min(worst(costs, first, last, cuts) for cuts in every)
    assert worst(costs, first, last, tuple(part.start for part in split[1:])) == best


def test_the_stage_with_the_head_has_fewer_layers() -> None:
    sizes = [len(part) for part in stage_layers(PRESETS["llama3-8b"], 4096, 8)]
    assert sum(sizes) == 32 and sizes[-1] < max(sizes)


def test_ends_that_count_as_layers_leave_the_outer_stages_one_less() -> None:
    """As BLOOM's 70 layers in twelve stages, and its 195B of 106."""
    for layers, middle in ((70, 6), (106, 9)):
        model = structs.replace(PRESETS["gpt3-175b"], layers=layers)
        workload = Workload(model=model, sequence=2048, global_batch=2048)
        ranks = rank_layers(workload, "1f1b", 12, 1, Software(counts_ends=True))
        assert [rank.dense for rank in ranks] == [middle - 1, *[middle] * 10, middle - 1]
    alone = rank_layers(workload, "1f1b", 1, 1, Software(counts_ends=True))
    assert [rank.dense for rank in alone] == [106]


def test_folded_schedules_come_back_on_the_same_ranks() -> None:
    assert [rank_stages("zero-bubble", 3, 2, rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]
    assert [rank_stages("interleaved", 3, 2, rank) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]


def test_layers_that_predict_further_on_are_with_the_head() -> None:
    def last(preset: str) -> tuple[int, int]:
        model = structs.replace(PRESETS[preset], mtp=MultiTokenPrediction(layers=2))
        (rank,) = _rank_layers(model, 4096, False, 1, 1, "head")
        return rank.dense, rank.moe

    assert last("llama3-8b") == (34, 0)
    assert last("deepseek-v3") == (3, 60)
