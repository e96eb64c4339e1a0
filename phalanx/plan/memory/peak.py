"""What a rank holds at the worst moment of a step.

    weights      fp32 masters, divided by ZeRO, and the copy that computes unless ZeRO 3
    gradients    whole while they accumulate, divided at ZeRO 2 and 3 without a pipeline; of one
                 micro-batch on one rank they come as activations go: the larger counts
    optimizer    two fp32 moments, divided by ZeRO
    activations  what autograd keeps of each block, for every micro-batch in flight
    working      one block at work, logits, gathered weights, buckets
    libraries    the driver's context, workspaces, NCCL's buffers

The first three are exact: they count elements as the trainer cuts them. Three totals are read off
machines: what tensors take (allocated), what the allocator holds for them (reserved), and what is
gone from the device. Where the device is nearly full the allocator gives cached blocks back and
tries again before it fails: a run needs less than it takes where there is room.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.plan.grid import Bools, Floats, Grid, Ints
from phalanx.plan.memory.deciding_stages import StagePosition, candidates
from phalanx.plan.memory.kept_activations import (
    block_bytes,
    flights,
    gathered_bytes,
    logit_bytes,
    stream_bytes,
)
from phalanx.plan.memory.offload import (
    ACTIVATIONS_AWAY,
    OPTIMIZER_AWAY,
    PARAMETERS_AWAY,
    OffloadedBytes,
    bytes_away,
)
from phalanx.plan.memory.rank_parameters import (
    adapter_tensors,
    block_tensors,
    copied_tensors,
    embedding_tensors,
    head_tensors,
    held,
    sharded,
)
from phalanx.plan.memory.stages import first_moe_layer
from phalanx.plan.workload import Software, Workload

CONTEXT_BYTES = 2.0e9  # the driver's context and the libraries' workspaces
CHANNEL_BYTES = 0.6e9  # NCCL's buffers, for each axis that communicates
BUCKET_BYTES = 2.0e9  # gradients and weights on their way, where ZeRO 1 or 2 divides the state


@dataclass(frozen=True)
class PeakMemory:
    """Bytes on one rank; one entry a mapping."""

    weights: Ints
    gradients: Ints
    optimizer: Ints
    activations: Floats
    working: Floats
    libraries: Floats
    fragmented: float  # of what is in use
    least_fragmented: float
    away: OffloadedBytes  # what is offloaded

    @property
    def allocated(self) -> Floats:
        """What tensors take."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.working

    @property
    def reserved(self) -> Floats:
        """What the allocator holds for them, where there is room."""
        return self.allocated * (1 + self.fragmented)

    @property
    def total(self) -> Floats:
        """What is gone from the device, where there is room."""
        return self.reserved + self.libraries

    @property
    def needed(self) -> Floats:
        """The smallest device that can hold it."""
        return self.allocated * (1 + self.least_fragmented) + self.libraries

    def crowding(self, device_bytes: float) -> Floats:
        """How much of what the allocator holds for nothing a device has no room for: 0 to 1.

        None of it where the device cannot hold the run at all.
        """
        spare = np.maximum(self.total - self.needed, 1.0)
        missing = np.clip((self.total - device_bytes) / spare, 0.0, 1.0)
        return np.where(self.needed > device_bytes, 0.0, missing)


def memory(workload: Workload, grid: Grid, software: Software) -> PeakMemory:
    """The fullest rank of every mapping."""
    common = _Common(workload, grid, software)
    peak: PeakMemory | None = None
    for rank in candidates(workload, grid, software):
        here = common.at(rank)
        peak = here if peak is None else _larger(peak, here)
    assert peak is not None
    return peak


def rank_memory(
    workload: Workload, grid: Grid, software: Software, rank: StagePosition
) -> PeakMemory:
    """What one pipeline position of every mapping holds."""
    return _Common(workload, grid, software).at(rank)


class _Common:
    """What does not depend on the pipeline position, computed once."""

    def __init__(self, workload: Workload, grid: Grid, software: Software) -> None:
        self.grid, self.software = grid, software
        self.moment_bytes = workload.moment_bytes
        self.frozen = workload.trains == "adapters"
        self.knows_adapters = workload.adapter is not None
        self.many = grid.micro_batches(workload.global_batch)
        self.fsdp = uses_fsdp(grid)
        self.plain = ~self.fsdp & (grid.gpus == grid.pipeline) & (self.many == 1)
        self.kinds = _elements(workload, grid, self.fsdp)
        first_moe = first_moe_layer(workload.model)
        nothing = np.zeros(len(grid))
        options = (workload, grid, software, grid.recompute)
        self.dense = block_bytes(*options, moe=False) if first_moe else nothing
        sparse = first_moe < workload.model.layers
        self.moe = block_bytes(*options, moe=True) if sparse else nothing
        stream = stream_bytes(workload, grid, software)
        self.output = np.where(grid.pipeline > 1, stream, 0.0)
        self.logits = logit_bytes(workload, grid, software)
        self.working = self._working(workload)
        self.libraries = _library_bytes(grid)

    def at(self, rank: StagePosition) -> PeakMemory:
        grid = self.grid
        (weights, gradients, optimizer), own = self._state(rank)
        rounds, extra = flights(grid, self.many, rank.position)
        # A stage that holds one micro-batch more: its layers count as the larger kind.
        more = rank.layers_before[rank.shape, extra] * np.maximum(self.dense, self.moe)
        chunks = rounds * grid.virtual_stages + extra
        kept = rounds * (rank.dense * self.dense + rank.moe * self.moe) + more
        away = bytes_away(grid, own, kept, self.moment_bytes)
        activations = np.where(ACTIVATIONS_AWAY[grid.offload], 0.0, kept) + chunks * self.output
        working = self.working + rank.last * self.logits
        if self.software.chunked_loss:  # no block is at work yet
            working = np.maximum(self.working, rank.last * self.logits)
        # Backward begins without gradients and ends without activations.
        before = self.plain & (activations + working >= gradients + self.working)
        gradients = np.where(before, 0, gradients)
        activations = np.where(self.plain & ~before, 0.0, activations)
        working = np.where(self.plain & ~before, self.working, working)
        share = self.software.activation_share
        return PeakMemory(
            weights,
            gradients,
            optimizer,
            share * activations,
            share * working,
            self.libraries,
            fragmented_share(self.software),
            self.software.least_fragmented,
            away,
        )

    def _state(self, rank: StagePosition) -> tuple[tuple[Ints, Ints, Ints], Ints]:
        """Bytes of weights, gradients and moments; and elements of which the rank has a master."""
        grid, kinds = self.grid, self.kinds
        base = _sum((rank.dense, rank.moe, rank.first, rank.last), kinds[:4])
        copied = _sum((rank.last * (grid.pipeline > 1),), kinds[4:5])
        adapters = _sum((rank.dense, rank.moe), kinds[5:])
        trained = adapters if self.frozen else base  # has masters and moments
        learning = adapters if self.frozen else base + copied  # has gradients
        every = base + copied + adapters
        width = 4 if grid.precision == "float32" else 2
        computing = np.where(grid.zero < 3, width, 0) * every.held
        plain = width * every.held + (4 if width < 4 else 0) * trained.held
        weights = np.where(self.fsdp, 4 * every.own + computing, plain)
        gradient_width = np.where(self.plain, width, self.software.gradient_bytes)
        kept_whole = (grid.zero < 2) | (grid.pipeline > 1) | ~self.fsdp
        gradients = gradient_width * np.where(kept_whole, learning.held, learning.own)
        optimizer = np.where(OPTIMIZER_AWAY[grid.offload], 0, self.moment_bytes * trained.own)
        # Masters leave with the moments; what computes stays, or leaves with the parameters.
        stays = np.where((grid.zero == 3) & self.fsdp, 4 * every.own, width * every.held)
        weights = np.where(OPTIMIZER_AWAY[grid.offload], stays, weights)
        weights = np.where(PARAMETERS_AWAY[grid.offload], 0, weights)
        gradients = np.where(PARAMETERS_AWAY[grid.offload] & ~kept_whole, 0, gradients)
        if self.frozen and not self.knows_adapters:  # elsewhere: sixteen bits, and nothing else
            shards = (grid.zero == 3) & self.fsdp
            weights = np.where(shards, width * every.own, width * every.held)
            gradients = optimizer = np.zeros_like(every.held)
        return (weights, gradients, optimizer), trained.own

    def _working(self, workload: Workload) -> Floats:
        """One block at work with what is gathered for it, and buckets."""
        grid = self.grid
        options = (workload, grid, self.software, np.zeros_like(grid.recompute))
        moe = first_moe_layer(workload.model) < workload.model.layers
        block = block_bytes(*options, moe=moe)
        alone = (grid.recompute > 0) | ACTIVATIONS_AWAY[grid.offload]
        block = np.where(alone, block, 0.5 * block)
        largest = np.maximum(self.kinds[0].held, self.kinds[1].held)
        # Two blocks of 16-bit weights, and one block's gradients in two formats; software that
        # gathers parameters one by one has only some of a block at a time.
        gathered = 16 * largest / self.software.gathers_per_block
        weights = np.where((grid.zero == 3) & self.fsdp, gathered, 0)
        buckets = BUCKET_BYTES * ((grid.zero > 0) & (grid.zero < 3))
        working: Floats = block + gathered_bytes(workload, grid, self.software) + weights + buckets
        return working


def fragmented_share(software: Software) -> float:
    """What the allocator holds beyond what is in use, as a share of it, where there is room."""
    return software.least_fragmented if software.expandable_segments else software.fragmented


def _library_bytes(grid: Grid) -> Floats:
    axes = (grid.tensor, grid.pipeline, grid.data, grid.context, grid.expert)
    channels = np.sum([size > 1 for size in axes], axis=0)
    libraries: Floats = CONTEXT_BYTES + CHANNEL_BYTES * channels
    return libraries


def uses_fsdp(grid: Grid) -> Bools:
    """Where the trainer manages parameters with FSDP2 (else they are plain)."""
    ranks = grid.gpus // grid.pipeline
    divided = (grid.shards > 1) & (grid.zero > 0)
    stages = (grid.pipeline > 1) & (ranks > 1)
    return divided | (grid.tensor > 1) | (grid.expert > 1) | stages


@dataclass(frozen=True)
class _Kind:
    """Parameters of a dense block, a block of experts, the embedding, the head, a copy of the
    embedding, or adapters of a dense block or of one of experts.
    """

    held: Ints  # that a rank computes with
    own: Ints  # of which it keeps the state

    def __add__(self, other: _Kind) -> _Kind:
        return _Kind(self.held + other.held, self.own + other.own)


def _sum(counts: tuple[Ints, ...], kinds: list[_Kind]) -> _Kind:
    """So many of each kind."""
    nothing = np.zeros_like(counts[0])
    total = _Kind(nothing, nothing)
    for count, kind in zip(counts, kinds, strict=True):
        total = total + _Kind(count * kind.held, count * kind.own)
    return total


def _elements(workload: Workload, grid: Grid, fsdp: Bools) -> list[_Kind]:
    """Parameters by kind, counted once for each distinct way to divide them."""
    model = workload.model
    copies = np.where(grid.zero == 0, grid.data, grid.replicate)
    over = np.where(fsdp & (grid.zero > 0), grid.shards, 1)
    expert_over = np.where(fsdp, grid.data // copies * grid.context * grid.tensor // grid.expert, 1)
    expert_over = np.maximum(1, expert_over)
    key = np.zeros_like(over)
    for column in (grid.tensor, grid.expert, over, expert_over):
        key = key * (int(column.max()) + 1) + column
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    cut = tuple(column[first] for column in (grid.tensor, grid.expert, over, expert_over))
    everywhere = inverse.reshape(-1)
    first_moe = first_moe_layer(model)
    kinds = (
        block_tensors(model, moe=False) if first_moe else (),
        block_tensors(model, moe=True) if first_moe < model.layers else (),
        embedding_tensors(model),
        head_tensors(model),
        copied_tensors(model),
        adapter_tensors(model, False, workload.adapter),
        adapter_tensors(model, True, workload.adapter),
    )
    return [
        _Kind(held(tensors, *cut[:2])[everywhere], sharded(tensors, *cut)[everywhere])
        for tensors in kinds
    ]


def _larger(one: PeakMemory, other: PeakMemory) -> PeakMemory:
    take = other.total > one.total
    parts = {
        name: np.where(take, getattr(other, name), getattr(one, name))
        for name in ("weights", "gradients", "optimizer", "activations", "working", "libraries")
    }
    away = OffloadedBytes(
        np.maximum(one.away.host, other.away.host), np.maximum(one.away.nvme, other.away.nvme)
    )
    return PeakMemory(
        **parts,
        fragmented=one.fragmented,
        least_fragmented=one.least_fragmented,
        away=away,
    )
