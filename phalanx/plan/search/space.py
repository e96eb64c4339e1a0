"""Every mapping that is valid for a model on a number of GPUs.

The rules are the trainer's: what it would refuse is not enumerated. Tensor parallelism stays
inside the NVLink domain and schedules that the trainer lacks stay out, unless they are pinned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from phalanx.config import Model, gate_up_groups, is_gated, ring_computes
from phalanx.hardware import Cluster
from phalanx.plan.grid import Bools, Grid, Ints
from phalanx.plan.memory.offload import PARAMETERS_AWAY
from phalanx.plan.workload import OFFLOADS, RECOMPUTES, SCHEDULES, Precision, Workload

MOST_MICRO_BATCH = 64
LEAST_TOKENS = 128  # that a rank is left with when context parallelism divides a sequence
RUNNABLE = ("1f1b", "gpipe", "interleaved", "zero-bubble")


class Pins(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the user has decided; None leaves a dimension to the search."""

    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    context: int | None = None
    expert: int | None = None
    zero: int | None = None
    replicate: Literal[1] | None = None  # 1: ZeRO 3 always over all ranks
    micro_batch: int | None = None
    virtual_stages: int | None = None
    recompute: str | None = None
    schedule: str | None = None
    offload: str | None = None


class Space:
    """All valid mappings onto exactly ``gpus`` GPUs, without writing every one of them down.

    ``rows`` are the ways to divide the GPUs, the batch and the layers; each is crossed with the
    levels of ZeRO and of recompute that mean something for it.
    """

    def __init__(
        self, workload: Workload, cluster: Cluster, gpus: int, pins: Pins, precision: Precision
    ) -> None:
        self.pins, self.precision = pins, precision
        found = list(_divisions(workload, cluster, gpus, pins))
        rows = np.array(found, dtype=np.int64).reshape(len(found), len(COLUMNS) - 1)
        rows = np.concatenate((rows, np.ones((len(rows), 1), dtype=np.int64)), axis=1)
        if pins.replicate is None and pins.zero in (None, 3):
            rows = np.concatenate((rows, _copies(rows, cluster.domain_gpus)))
        self.rows = rows
        self.choices = np.array(
            [
                (zero, recompute)
                for zero in _chosen(range(4), pins.zero)
                for recompute in _codes(RECOMPUTES, pins.recompute)
            ],
            dtype=np.int64,
        )
        self.offload = OFFLOADS.index(pins.offload or "none")

    def allowed(self, rows: Ints) -> Bools:
        """[row, choice]: combinations that mean something."""
        _, pipeline, data, context, expert, _, schedule, _, replicate = rows.T[:, :, None]
        tensor = rows.T[0][:, None]
        zero, recompute = self.choices.T[:, None, :]
        # ZeRO needs ranks to divide over.
        allowed: Bools = (data * context > 1) | (zero == 0) | (self.pins.zero is not None)
        folded = schedule == SCHEDULES.index("zero-bubble")
        allowed &= ~(folded & (zero == 3))  # weights must stay until their late gradients
        # Its backward runs in two halves, and what selective recompute keeps serves only one.
        allowed &= ~(folded & (recompute == RECOMPUTES.index("selective")))
        # Without ZeRO every replica is a full copy: experts divide over the other axes alone.
        allowed &= (zero > 0) | (context * tensor % expert == 0)
        # Without a pipeline only: there every micro-batch gathers the weights again.
        allowed &= (replicate == 1) | ((zero == 3) & (pipeline == 1))
        # Parameters in host memory are FSDP's business: they must be divided by it.
        allowed &= (zero == 3) | (not PARAMETERS_AWAY[self.offload])
        return allowed

    def divisions(self) -> Grid:
        """Every row once, without ZeRO and recompute."""
        nothing = np.zeros(len(self.rows), dtype=np.int64)
        columns = dict(zip(COLUMNS, self.rows.T, strict=True))
        return Grid(
            **columns, zero=nothing, recompute=nothing, offload=nothing, precision=self.precision
        )

    def grid(self, rows: Ints) -> tuple[Ints, Grid]:
        """The mappings of these rows with every choice that they allow, and the row of each."""
        which, choice = np.nonzero(self.allowed(rows))
        columns = dict(zip(COLUMNS, rows[which].T, strict=True))
        zero, recompute = self.choices[choice].T
        grid = Grid(
            **columns,
            zero=zero,
            recompute=recompute,
            offload=np.full(len(which), self.offload),
            precision=self.precision,
        )
        return which, grid


COLUMNS = (
    "tensor",
    "pipeline",
    "data",
    "context",
    "expert",
    "micro_batch",
    "schedule",
    "virtual_stages",
    "replicate",
)


def offloaded(grid: Grid) -> tuple[Ints, Grid]:
    """Each mapping with every offload that it allows but "none", and the index of each in grid."""
    codes = np.arange(1, len(OFFLOADS))
    found = (grid.zero[:, None] == 3) | ~PARAMETERS_AWAY[codes]
    which, code = np.nonzero(found)
    return which, replace(grid.take(which), offload=codes[code])


def least_held(grid: Grid) -> tuple[Grid, Grid]:
    """The offloads that hold least on the device: all state away, and activations too.

    (Both: a block whose activations leave is kept whole while it works.)
    """
    grids = []
    for rest in ("", "+activations"):
        codes = [OFFLOADS.index(state + rest) for state in ("optimizer", "parameters")]
        grids.append(replace(grid, offload=np.where(grid.zero == 3, codes[1], codes[0])))
    return grids[0], grids[1]


def _copies(rows: Ints, domain: int) -> Ints:
    """ZeRO 3 also within groups (HSDP): shards over a domain, or twice, four times ... as many."""
    whole = rows[rows[:, COLUMNS.index("pipeline")] == 1]
    tensor, _, data, context, expert = whole.T[:5]
    ranks = tensor * context
    parts = [whole[:0]]
    shards = domain
    while len(whole) and shards <= int((data * ranks).max()) // 2:
        own = np.maximum(1, shards // ranks)  # of the data axis
        fits = (data % own == 0) & (data > own) & (own * ranks == shards)
        fits &= (own * ranks) % expert == 0
        part = whole[fits].copy()
        part[:, COLUMNS.index("replicate")] = data[fits] // own[fits]
        parts.append(part)
        shards *= 2
    return np.concatenate(parts)


def _divisions(
    workload: Workload, cluster: Cluster, gpus: int, pins: Pins
) -> Iterator[tuple[int, ...]]:
    """(tensor, pipeline, data, context, expert, micro_batch, schedule, virtual_stages)."""
    model, batch = workload.model, workload.global_batch
    widest = gpus if pins.tensor else cluster.domain_gpus
    for tensor in _chosen(_divisors(gpus), pins.tensor):
        if tensor > widest or not tensor_divides(model, tensor):
            continue
        for pipeline in _chosen(_divisors(gpus // tensor), pins.pipeline):
            if pipeline > model.layers:
                continue
            rest, left = divmod(gpus, tensor * pipeline)
            if left:
                continue
            for context in _chosen(_divisors(rest), pins.context):
                data = rest // context
                if (
                    rest % context
                    or data > batch
                    or (pins.data is not None and data != pins.data)
                    or not context_divides(workload.sequence, context, tensor)
                    or not heads_allow(model, context, tensor)
                ):
                    continue
                experts = list(_experts(model, data * context * tensor, pins))
                for micro_batch in _micro_batches(batch, data, pins):
                    m = -(-batch // (data * micro_batch))
                    for schedule, virtual in _schedules(model, pipeline, m, pins):
                        for expert in experts:
                            yield (
                                tensor, pipeline, data, context, expert, micro_batch,
                                schedule, virtual,
                            )  # fmt: skip


def tensor_divides(model: Model, tensor: int) -> bool:
    """Whether heads, MLP and vocabulary come out even over a tensor axis."""
    heads = model.heads if model.latent is not None else model.kv_heads
    parts = [heads, model.vocab]
    if model.moe is None or model.moe.first_dense_layers > 0:
        parts.append(gate_up_groups(model.ffn) if is_gated(model) else model.ffn)
    whole_norms = model.qk_norm and model.qk_norm_over == "all" and tensor > 1
    return not whole_norms and all(size % tensor == 0 for size in parts)


def heads_allow(model: Model, context: int, tensor: int) -> bool:
    """Whether a model may be split over its context: without the ring ranks need whole heads."""
    heads = model.heads if model.latent is not None else model.kv_heads
    return context == 1 or ring_computes(model) or heads % (tensor * context) == 0


def context_divides(sequence: int, context: int, tensor: int) -> bool:
    """Whether a sequence comes out even over ring attention and the tensor axis."""
    if context == 1:
        return sequence % tensor == 0
    unit = math.lcm(2 * context, context * tensor)
    return sequence % unit == 0 and sequence // context >= LEAST_TOKENS


def _experts(model: Model, ranks: int, pins: Pins) -> Iterator[int]:
    if model.moe is None:
        yield 1
        return
    for expert in _chosen(_divisors(model.moe.experts), pins.expert):
        if ranks % expert == 0:
            yield expert


def _micro_batches(batch: int, data: int, pins: Pins) -> list[int]:
    """Sizes that fill the batch as evenly as it can be filled."""
    if pins.micro_batch is not None:
        return [pins.micro_batch] if data * pins.micro_batch <= batch else []
    own = batch // data
    if batch % data == 0:
        return [size for size in _divisors(own) if size <= MOST_MICRO_BATCH]
    return [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= own]


def _schedules(model: Model, pipeline: int, m: int, pins: Pins) -> list[tuple[int, int]]:
    found = _all_schedules(model.layers, pipeline, m, pins.schedule or "")
    if model.mtp is not None:  # the trainer refuses to split their backward
        found = [pair for pair in found if SCHEDULES[pair[0]] != "zero-bubble"]
    if pins.virtual_stages is None:
        return found
    return [pair for pair in found if pair[1] == pins.virtual_stages]


@lru_cache(maxsize=65536)
def _all_schedules(layers: int, pipeline: int, m: int, pinned: str) -> list[tuple[int, int]]:
    """(schedule, virtual stages) that can run m micro-batches."""
    if pipeline == 1:
        return [(SCHEDULES.index("1f1b"), 1)]
    schedules = []
    for name in (pinned,) if pinned else RUNNABLE:
        code = SCHEDULES.index(name)
        if name == "gpipe" or (name in ("1f1b", "zb-h1") and m >= pipeline):
            schedules.append((code, 1))
        elif name in ("zero-bubble", "dualpipe") and m >= pipeline and 2 * pipeline <= layers:
            schedules.append((code, 2))
        elif name == "interleaved" and m % max(1, m // pipeline) == 0:
            most = layers // pipeline
            schedules += [(code, virtual) for virtual in range(2, most + 1) if _even(most, virtual)]
    return schedules


def _even(most: int, virtual: int) -> bool:
    """Stage counts worth trying: those that change the number of layers of a stage."""
    return virtual == most or most // virtual != most // (virtual + 1)


def _chosen(values: Any, pinned: int | None) -> Any:
    return values if pinned is None else (pinned,)


def _codes(names: tuple[str, ...], pinned: str | None) -> list[int]:
    return list(range(len(names))) if pinned is None else [names.index(pinned)]


@lru_cache(maxsize=4096)
def _divisors(number: int) -> tuple[int, ...]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))
