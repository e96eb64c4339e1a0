"""Stages of a mapping, and the time that schedules leave idle.

A step of m micro-batches over p ranks, each holding v stages, takes

    m * slowest + (p - 1) / v * mean * idle

where ``slowest`` and ``mean`` are a rank's forward and backward of one micro-batch. ``idle`` is
1 for GPipe, 1F1B and interleaved, 1/3 for ZB-H1, 0 for ZB-V; DualPipe overlaps the two
directions of p/2 - 1 micro-batches and has half the ranks to fill.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from phalanx.config import Model
from phalanx.plan.memory.model_counts import forward_flops_per_token
from phalanx.plan.memory.stages import FOLDED, rank_stages, stage_layers
from phalanx.plan.question.workload import SCHEDULES, Software, Workload
from phalanx.plan.search.grid import Bools, Floats, Grid

IDLE = {
    "1f1b": 1.0,
    "gpipe": 1.0,
    "interleaved": 1.0,
    "zb-h1": 1 / 3,
    "zero-bubble": 0.0,
    "dualpipe": 0.25,
}
IDLE_BY_CODE = np.array([IDLE[name] for name in SCHEDULES])


@dataclass(frozen=True)
class RankLayers:
    """What a pipeline rank holds."""

    dense: int
    moe: int
    first: bool  # the embedding
    last: bool  # the head
    stages: tuple[int, ...]  # layers of each of its stages, in the order of its stages


def rank_layers(
    workload: Workload, schedule: str, pipeline: int, virtual: int, *, balanced: bool
) -> list[RankLayers]:
    """What each pipeline rank holds under a schedule."""
    folded = schedule in FOLDED
    return _rank_layers(workload.model, workload.sequence, folded, pipeline, virtual, balanced)


@lru_cache(maxsize=8192)
def _rank_layers(
    model: Model, sequence: int, folded: bool, pipeline: int, virtual: int, balanced: bool
) -> list[RankLayers]:
    total = pipeline * virtual
    if balanced or model.layers % total:
        split = stage_layers(model, sequence, total)
    else:
        each = model.layers // total
        split = [range(i * each, (i + 1) * each) for i in range(total)]
    first_moe = first_moe_layer(model)
    ranks = []
    for rank in range(pipeline):
        numbers = rank_stages(FOLDED[0] if folded else "", pipeline, virtual, rank)
        layers = [layer for number in numbers for layer in split[number]]
        dense = sum(layer < first_moe for layer in layers)
        ranks.append(
            RankLayers(
                dense,
                len(layers) - dense,
                0 in numbers,
                total - 1 in numbers,
                tuple(len(split[number]) for number in numbers),
            )
        )
    return ranks


def first_moe_layer(model: Model) -> int:
    """Index of the first layer with experts; the number of layers where there is none."""
    return model.moe.first_dense_layers if model.moe is not None else model.layers


@dataclass(frozen=True)
class Bottleneck:
    """The rank that takes longest, for each mapping."""

    dense: Floats
    moe: Floats
    head: Floats  # 1 where it holds the head


def bottleneck(workload: Workload, software: Software, grid: Grid) -> Bottleneck:
    """Find the slowest rank of every mapping by FLOPs."""
    flops = forward_flops_per_token(workload.model, workload.sequence)
    first_moe = first_moe_layer(workload.model)
    dense_cost = flops.per_layer[0] if first_moe else 0
    moe_cost = flops.per_layer[-1] if first_moe < workload.model.layers else 0
    # The shape of a pipeline is (ranks, stages a rank, folded or looped).
    folded = is_folded(grid)
    keys = (grid.pipeline * 1024 + grid.virtual_stages) * 2 + folded
    shapes, inverse = np.unique(keys, return_inverse=True)
    rows = []
    for key in shapes.tolist():
        pipeline, virtual = key // 2048, key // 2 % 1024
        schedule = "zero-bubble" if key % 2 else "1f1b"
        ranks = rank_layers(workload, schedule, pipeline, virtual, balanced=software.balances_head)
        worst = max(
            ranks, key=lambda r: r.dense * dense_cost + r.moe * moe_cost + r.last * flops.head
        )
        rows.append((worst.dense, worst.moe, worst.last))
    table = np.array(rows, dtype=np.float64)[inverse.reshape(-1)]
    return Bottleneck(table[:, 0], table[:, 1], table[:, 2])


def is_folded(grid: Grid) -> Bools:
    """Where a rank holds a stage of each half of a V."""
    return np.isin(grid.schedule, [SCHEDULES.index(name) for name in FOLDED])


def idle_share(grid: Grid) -> Floats:
    """Micro-batches' worth of time that a rank waits in a step."""
    idle: Floats = (grid.pipeline - 1) / grid.virtual_stages * IDLE_BY_CODE[grid.schedule]
    return idle
