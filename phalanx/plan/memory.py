"""What a rank holds at the worst moment of a step.

    weights      fp32 masters, divided by ZeRO, and the copy that computes unless ZeRO 3
    gradients    whole while they accumulate, divided at ZeRO 2 and 3 without a pipeline
    optimizer    two fp32 moments, divided by ZeRO
    activations  what autograd keeps of each block, for every micro-batch in flight
    working      one block at work, logits, gathered weights, buckets, NCCL's buffers

The first three are exact: they count elements as the trainer cuts them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.plan.counting import (
    block_tensors,
    embedding_tensors,
    head_tensors,
    held,
    sharded,
)
from phalanx.plan.grid import Bools, Floats, Grid, Ints
from phalanx.plan.kept import block_bytes, flights, gathered_bytes, logit_bytes, stream_bytes
from phalanx.plan.pipeline import RankLayers, first_moe_layer, is_folded, rank_layers
from phalanx.plan.workload import OFFLOADS, SCHEDULES, Software, Workload

CONTEXT_BYTES = 2.0e9  # the driver's context and the libraries' workspaces
CHANNEL_BYTES = 0.6e9  # NCCL's buffers, for each axis that communicates
BUCKET_BYTES = 2.0e9  # gradients and weights on their way, where ZeRO 1 or 2 divides the state
FRAGMENTED = 0.18  # what the allocator cannot reuse, over what is in use


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank; one entry a mapping."""

    weights: Ints
    gradients: Ints
    optimizer: Ints
    activations: Floats
    working: Floats

    @property
    def total(self) -> Floats:
        state = self.weights + self.gradients + self.optimizer
        parts = state + self.activations + self.working
        return parts * (1 + FRAGMENTED)


@dataclass(frozen=True)
class Rank:
    """One pipeline position of every mapping: how many blocks it holds, and its place."""

    position: Ints
    dense: Ints
    moe: Ints
    first: Bools
    last: Bools
    shape: Ints  # row of layers_before that a mapping has
    layers_before: Ints  # [shape, turn]: layers of its first, second, ... stages, summed


def memory(workload: Workload, grid: Grid, software: Software) -> Memory:
    """The fullest rank of every mapping: the first, the first with most layers, or the last."""
    found: Memory | None = None
    for rank in _candidates(workload, grid, software):
        here = rank_memory(workload, grid, software, rank)
        found = here if found is None else _larger(found, here)
    assert found is not None
    return found


def rank_memory(workload: Workload, grid: Grid, software: Software, rank: Rank) -> Memory:
    """What one pipeline position of every mapping holds."""
    model = workload.model
    whole, own = _elements(workload, grid, rank)
    many = grid.micro_batches(workload.global_batch)
    fsdp, ddp = uses_fsdp(grid), uses_ddp(grid)
    width = 4 if grid.precision == "float32" else 2
    weights = np.where(
        fsdp, 4 * own + np.where(grid.zero < 3, width, 0) * whole, whole * (4 + width % 4)
    )
    plain = ~fsdp & ~ddp & (many == 1)
    gradient_width = np.where(plain, width, software.gradient_bytes)
    kept_whole = (grid.zero < 2) | (grid.pipeline > 1) | ~fsdp
    gradients = gradient_width * np.where(kept_whole, whole, own)
    optimizer = 8 * own
    offload = grid.offload
    optimizer = np.where(offload >= OFFLOADS.index("optimizer"), 0, optimizer)
    weights = np.where(offload == OFFLOADS.index("parameters"), 0, weights)
    per_block = block_bytes(workload, grid, software, grid.recompute)
    output = np.where(grid.pipeline > 1, stream_bytes(workload, grid, software), 0.0)
    rounds, extra = flights(grid, many, rank.position)
    layers = rank.dense + rank.moe
    more = rank.layers_before[rank.shape, extra]
    chunks = rounds * grid.virtual_stages + extra
    activations = (rounds * layers + more) * per_block + chunks * output
    block_all = block_bytes(workload, grid, software, np.zeros_like(grid.recompute))
    largest = held(block_tensors(model, bool(model.moe)), grid.tensor, grid.expert)
    working = np.where(grid.recompute > 0, block_all, 0.5 * block_all)
    working = working + gathered_bytes(workload, grid, software)
    working = working + rank.last * logit_bytes(workload, grid, software)
    gathered = np.where((grid.zero == 3) & fsdp, 2 * largest * (2 * 2 + 4), 0)
    axes = sum((size > 1).astype(np.int64) for size in _axes(grid))
    working = working + gathered + CONTEXT_BYTES + CHANNEL_BYTES * axes
    working = working + BUCKET_BYTES * ((grid.zero > 0) & (grid.zero < 3))
    return Memory(weights, gradients, optimizer, activations, working)


def uses_fsdp(grid: Grid) -> Bools:
    """Where the trainer manages parameters with FSDP2 (else they are plain)."""
    ranks = grid.gpus // grid.pipeline
    divided = (grid.shards > 1) & (grid.zero > 0)
    stages = (grid.pipeline > 1) & (ranks > 1)
    return divided | (grid.tensor > 1) | (grid.expert > 1) | stages


def uses_ddp(grid: Grid) -> Bools:
    """Where plain parameters have copies."""
    return ~uses_fsdp(grid) & (grid.gpus > grid.pipeline)


def _axes(grid: Grid) -> tuple[Ints, ...]:
    return (grid.tensor, grid.pipeline, grid.data, grid.context, grid.expert)


def _elements(workload: Workload, grid: Grid, rank: Rank) -> tuple[Ints, Ints]:
    """Parameters that a rank computes with, and those of which it keeps the state."""
    model = workload.model
    fsdp = uses_fsdp(grid)
    over = np.where(fsdp & (grid.zero > 0), grid.shards, 1)
    expert_over = np.where(
        fsdp,
        np.maximum(1, grid.data // _copies(grid) * grid.context * grid.tensor // grid.expert),
        1,
    )
    whole, own = np.zeros_like(grid.tensor), np.zeros_like(grid.tensor)
    first_moe = first_moe_layer(model)
    kinds = [
        (rank.dense, block_tensors(model, moe=False) if first_moe else ()),
        (rank.moe, block_tensors(model, moe=True) if first_moe < model.layers else ()),
        (rank.first.astype(np.int64), embedding_tensors(model)),
        (rank.last.astype(np.int64), head_tensors(model)),
    ]
    for count, tensors in kinds:
        if tensors:
            whole = whole + count * held(tensors, grid.tensor, grid.expert)
            own = own + count * sharded(tensors, grid.tensor, grid.expert, over, expert_over)
    return whole, own


def _copies(grid: Grid) -> Ints:
    return np.where(grid.zero == 0, grid.data, grid.replicate)


def _candidates(workload: Workload, grid: Grid, software: Software) -> list[Rank]:
    folded = is_folded(grid)
    keys = (grid.pipeline * 1024 + grid.virtual_stages) * 2 + folded
    shapes, inverse = np.unique(keys, return_inverse=True)
    widest = int(grid.virtual_stages.max())
    chosen: list[list[tuple[int, ...]]] = [[], [], []]
    for key in shapes.tolist():
        pipeline, virtual = key // 2048, key // 2 % 1024
        schedule = "zero-bubble" if key % 2 else "1f1b"
        ranks = rank_layers(workload, schedule, pipeline, virtual, balanced=software.balances_head)
        most = max(rank.dense + rank.moe for rank in ranks)
        fullest = next(i for i, rank in enumerate(ranks) if rank.dense + rank.moe == most)
        for slot, position in enumerate((0, fullest, pipeline - 1)):
            chosen[slot].append(_row(position, ranks[position], widest))
    index = inverse.reshape(-1)
    return [_rank(np.array(rows, dtype=np.int64), index) for rows in chosen]


def rank_at(workload: Workload, grid: Grid, software: Software, position: int) -> Rank:
    """One position of a grid whose mappings all have the same pipeline."""
    schedule = SCHEDULES[int(grid.schedule[0])]
    pipeline, virtual = int(grid.pipeline[0]), int(grid.virtual_stages[0])
    ranks = rank_layers(workload, schedule, pipeline, virtual, balanced=software.balances_head)
    row = _row(position, ranks[position], virtual)
    return _rank(np.array([row], dtype=np.int64), np.zeros(len(grid), dtype=np.int64))


def _row(position: int, rank: RankLayers, widest: int) -> tuple[int, ...]:
    before = [sum(rank.stages[:turn]) for turn in range(widest + 1)]
    return (position, rank.dense, rank.moe, int(rank.first), int(rank.last), *before)


def _rank(table: Ints, index: Ints) -> Rank:
    position, dense, moe, first, last = (table[index, i] for i in range(5))
    return Rank(position, dense, moe, first.astype(bool), last.astype(bool), index, table[:, 5:])


def _larger(one: Memory, other: Memory) -> Memory:
    take = other.total > one.total
    parts = {
        name: np.where(take, getattr(other, name), getattr(one, name))
        for name in ("weights", "gradients", "optimizer", "activations", "working")
    }
    return Memory(**parts)
