"""The slowest rank of a pipeline, and the time that schedules leave idle.

A step of m micro-batches over p ranks, each holding v stages, takes

    m * slowest + (p - 1) / v * others * idle

where ``slowest`` is the forward and backward of one micro-batch on the rank that takes longest, and
``others`` the mean over the rest: it waits for them to fill and to drain. ``idle`` is 1 for GPipe,
1F1B and interleaved, 1/3 for ZB-H1, 0 for ZB-V; DualPipe overlaps the two directions of p/2 - 1
micro-batches and has half the ranks to fill.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.plan.grid import Floats, Grid
from phalanx.plan.memory.model_counts import forward_flops_per_token
from phalanx.plan.memory.stages import first_moe_layer, is_folded, rank_layers
from phalanx.plan.workload import SCHEDULES, Software, Workload

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
        ranks = rank_layers(workload, schedule, pipeline, virtual, software)
        worst = max(
            ranks, key=lambda r: r.dense * dense_cost + r.moe * moe_cost + r.last * flops.head
        )
        rows.append((worst.dense, worst.moe, worst.last))
    table = np.array(rows, dtype=np.float64)[inverse.reshape(-1)]
    return Bottleneck(table[:, 0], table[:, 1], table[:, 2])


def idle_share(grid: Grid) -> Floats:
    """Micro-batches' worth of time that a rank waits in a step."""
    idle: Floats = (grid.pipeline - 1) / grid.virtual_stages * IDLE_BY_CODE[grid.schedule]
    return idle
