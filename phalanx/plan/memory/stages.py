"""Which layers each pipeline stage holds, and each rank.

Stages are contiguous and the costliest is as cheap as possible; embedding and output head ride
on the outer ones. Among equals a stage takes as many layers as it can, from the last one on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from phalanx.config import Model
from phalanx.plan.grid import Bools, Grid
from phalanx.plan.memory.model_counts import forward_flops_per_token, prediction_layers
from phalanx.plan.workload import SCHEDULES, Software, Workload

Cut = Literal["head", "ends", "evenly"]  # what counts beside layers where stages are cut
FOLDED = ("zero-bubble", "dualpipe")  # the second half of the stages comes back: a V


class StageSplitter:
    """Best splits of the same layers into any number of stages, from one table.

    ``worst[s, end]`` is the least cost of the costliest of stages 0..s over layers [0, end),
    and ``starts[s, end]`` the first layer of stage s there. Only the last stage carries the
    head, so the table without it serves every number of stages.
    """

    def __init__(self, costs: Sequence[float], first: float, last: float) -> None:
        self.layers, self.last = len(costs), float(last)
        self.total = np.concatenate(([0.0], np.cumsum(np.asarray(costs, dtype=np.float64))))
        self.worst = [self.total + first]
        self.starts: list[npt.NDArray[np.int64]] = [np.zeros(self.layers + 1, dtype=np.int64)]
        spans = self.total[None, :] - self.total[:, None]  # [start, end]
        order = np.arange(self.layers + 1)
        self.spans = np.where(order[:, None] < order[None, :], spans, np.inf)

    def split(self, stages: int) -> list[range]:
        """The layers of each stage; every stage gets at least one."""
        assert 1 <= stages <= self.layers
        cuts = [self.layers]
        for stage in range(stages - 1, -1, -1):
            extra = self.last if stage == stages - 1 else 0.0
            cuts.append(self._start(stage, cuts[-1], extra))
        cuts.reverse()
        return [range(a, b) for a, b in pairwise(cuts)]

    def _start(self, stage: int, end: int, extra: float) -> int:
        if stage == 0:
            return 0
        self._extend(stage if extra == 0.0 else stage - 1)
        if extra == 0.0:
            return int(self.starts[stage][end])
        costs = np.maximum(self.worst[stage - 1][stage:end], self.spans[stage:end, end] + extra)
        return stage + int(np.argmin(costs))

    def _extend(self, stage: int) -> None:
        while len(self.worst) <= stage:
            here = len(self.worst)
            before = self.worst[-1][:, None]
            costs = np.maximum(before, self.spans)
            costs[:here] = np.inf  # the stages before need a layer each
            self.starts.append(np.argmin(costs, axis=0))
            self.worst.append(np.min(costs, axis=0))


def stage_layers(model: Model, sequence: int, stages: int) -> list[range]:
    """The layers of every stage, balanced by FLOPs including the head and what looks further on."""
    return list(_stage_layers(model, sequence, stages))


@lru_cache(maxsize=8192)
def _stage_layers(model: Model, sequence: int, stages: int) -> tuple[range, ...]:
    if stages == 1:
        return (range(model.layers),)
    return tuple(_splitter(model, sequence).split(stages))


@lru_cache(maxsize=64)
def _splitter(model: Model, sequence: int) -> StageSplitter:
    flops = forward_flops_per_token(model, sequence)
    return StageSplitter(flops.per_layer, 0.0, flops.head + flops.prediction)


def rank_stages(schedule: str, pipeline: int, virtual_stages: int, rank: int) -> list[int]:
    """Stage numbers of a pipeline rank: looped, or as a V for schedules that fold back."""
    if schedule in FOLDED:
        return [rank, 2 * pipeline - 1 - rank]
    return [rank + turn * pipeline for turn in range(virtual_stages)]


@dataclass(frozen=True)
class RankLayers:
    """What a pipeline rank holds."""

    dense: int
    moe: int
    first: bool  # the embedding
    last: bool  # the head
    stages: tuple[int, ...]  # layers of each of its stages, in the order of its stages


def rank_layers(
    workload: Workload, schedule: str, pipeline: int, virtual: int, software: Software
) -> list[RankLayers]:
    """What each pipeline rank holds under a schedule."""
    cut: Cut = "ends" if software.counts_ends else "head" if software.balances_head else "evenly"
    sequence = workload.divided_by or workload.sequence
    return _rank_layers(workload.model, sequence, schedule in FOLDED, pipeline, virtual, cut)


@lru_cache(maxsize=8192)
def _rank_layers(
    model: Model, sequence: int, folded: bool, pipeline: int, virtual: int, cut: Cut
) -> list[RankLayers]:
    total = pipeline * virtual
    if cut == "ends" and total > 1:
        split = StageSplitter([1.0] * model.layers, 1.0, 1.0).split(total)
    elif cut == "head" or model.layers % total:
        split = stage_layers(model, sequence, total)
    else:
        each = model.layers // total
        split = [range(i * each, (i + 1) * each) for i in range(total)]
    first_moe = first_moe_layer(model)
    ranks = []
    for rank in range(pipeline):
        numbers = rank_stages(FOLDED[0] if folded else "", pipeline, virtual, rank)
        layers = [layer for number in numbers for layer in split[number]]
        if total - 1 in numbers:
            layers += range(model.layers, model.layers + prediction_layers(model))
        sparse = sum(layer >= first_moe for layer in layers) if model.moe is not None else 0
        ranks.append(
            RankLayers(
                len(layers) - sparse,
                sparse,
                0 in numbers,
                total - 1 in numbers,
                tuple(len(split[number]) for number in numbers),
            )
        )
    return ranks


def first_moe_layer(model: Model) -> int:
    """Index of the first layer with experts; the number of layers where there is none."""
    return model.moe.first_dense_layers if model.moe is not None else model.layers


def is_folded(grid: Grid) -> Bools:
    """Where a rank holds a stage of each half of a V."""
    return np.isin(grid.schedule, [SCHEDULES.index(name) for name in FOLDED])
