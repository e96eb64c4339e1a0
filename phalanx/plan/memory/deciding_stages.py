"""The pipeline positions whose memory decides: what they hold, for many mappings at once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from phalanx.plan.grid import Grid, Ints
from phalanx.plan.memory.stages import RankLayers, is_folded, rank_layers
from phalanx.plan.workload import SCHEDULES, Software, Workload


@dataclass(frozen=True)
class StagePosition:
    """One pipeline position of every mapping: how many blocks it holds, and its place."""

    position: Ints
    dense: Ints
    moe: Ints
    first: Ints  # 1 where it holds the embedding
    last: Ints  # 1 where it holds the head
    shape: Ints  # row of layers_before that a mapping has
    layers_before: Ints  # [shape, turn]: layers of its first, second, ... stages, summed


def candidates(workload: Workload, grid: Grid, software: Software) -> list[StagePosition]:
    """The positions that may be fullest: the first, the first with most layers, the last."""
    folded = is_folded(grid)
    keys = (grid.pipeline * 1024 + grid.virtual_stages) * 2 + folded
    shapes, inverse = np.unique(keys, return_inverse=True)
    widest = int(grid.virtual_stages.max())
    chosen: list[list[tuple[int, ...]]] = [[], [], []]
    for key in shapes.tolist():
        pipeline, virtual = key // 2048, key // 2 % 1024
        schedule = "zero-bubble" if key % 2 else "1f1b"
        ranks = rank_layers(workload, schedule, pipeline, virtual, software)
        most = max(rank.dense + rank.moe for rank in ranks)
        fullest = next(i for i, rank in enumerate(ranks) if rank.dense + rank.moe == most)
        for slot, position in enumerate((0, fullest, pipeline - 1)):
            chosen[slot].append(_row(position, ranks[position], widest))
    index = inverse.reshape(-1)
    return [_rank(np.array(rows, dtype=np.int64), index) for rows in chosen]


def rank_at(workload: Workload, grid: Grid, software: Software, position: int) -> StagePosition:
    """One position of a grid whose mappings all have the same pipeline."""
    schedule = SCHEDULES[int(grid.schedule[0])]
    pipeline, virtual = int(grid.pipeline[0]), int(grid.virtual_stages[0])
    ranks = rank_layers(workload, schedule, pipeline, virtual, software)
    row = _row(position, ranks[position], virtual)
    return _rank(np.array([row], dtype=np.int64), np.zeros(len(grid), dtype=np.int64))


def _row(position: int, rank: RankLayers, widest: int) -> tuple[int, ...]:
    before = list(accumulate(rank.stages, initial=0))
    before += [before[-1]] * (widest + 1 - len(before))
    return (position, rank.dense, rank.moe, int(rank.first), int(rank.last), *before)


def _rank(table: Ints, index: Ints) -> StagePosition:
    position, dense, moe, first, last = (table[index, i] for i in range(5))
    return StagePosition(position, dense, moe, first, last, index, table[:, 5:])
