"""Bytes of activations that stay until backward.

Of each block and token, in 16-bit elements: the inputs of both norms and of both branches
(4 dim), queries, keys, values and the attended heads, and the MLP's hidden widths. Tensor
parallelism divides what lies inside the branches, sequence parallelism the rest as well.
Attention that is not fused keeps its scores: 5 bytes a head and key. Selective recompute drops
what is cheap to redo (the scores, or the results of elementwise work), full recompute all but a
block's input.
"""

from __future__ import annotations

import numpy as np

from phalanx.plan.grid import Floats, Grid, Ints
from phalanx.plan.workload import RECOMPUTES, SCHEDULES, Software, Workload

SCORE_BYTES = 5.0
NARROW = ("fp8", "mxfp8", "nvfp4")  # keep the inputs of matmuls in one byte


def block_bytes(workload: Workload, grid: Grid, software: Software, recompute: Ints) -> Floats:
    """Bytes that one block keeps of one micro-batch, on one rank."""
    model = workload.model
    tokens = grid.micro_batch * workload.sequence / grid.context
    t = grid.tensor
    stream = 1.0 / t if software.sequence_parallel else np.ones(len(grid))
    if model.latent is not None:
        latent = model.latent
        heads = model.heads * (2 * model.head_dim + 2 * latent.value_head_dim)
    else:
        heads = (2 * model.heads + 2 * model.kv_heads) * model.head_dim
    gates = 2 if model.mlp == "swiglu" else 1
    hidden = float(model.ffn)
    if model.moe is not None:
        hidden = model.moe.top_k * model.moe.ffn + model.moe.shared_ffn
        gates = 2
    unfused = software.attention == "unfused"
    scores = SCORE_BYTES * model.heads / t * workload.sequence if unfused else 0.0
    masks = 2 * model.dim * stream if unfused else 0.0  # of dropout, a byte each
    everything = 2 * (4 * model.dim * stream + (heads + (gates + 1) * hidden) / t) + masks
    if grid.precision in NARROW:
        attended = model.heads * (model.latent.value_head_dim if model.latent else model.head_dim)
        everything = everything - 2 * model.dim * stream - (hidden + attended) / t
    if unfused:
        selective = everything
    else:
        products = (heads + gates * hidden) / t * software.selective_share
        selective = 2 * ((1 + 2 * software.selective_share) * model.dim * stream + products)
    everything = everything + scores
    if not software.fused:
        everything = everything * 1.35
        selective = selective * 1.1
    full = 2 * model.dim * stream
    kept = np.select(
        [recompute == RECOMPUTES.index(name) for name in RECOMPUTES],
        [everything, selective, full],
    )
    return tokens * kept


def stream_bytes(workload: Workload, grid: Grid, software: Software) -> Floats:
    """The residual stream of one micro-batch on one rank: what a stage hands on."""
    tokens = grid.micro_batch * workload.sequence / grid.context
    split = grid.tensor if software.sequence_parallel else 1
    return 2.0 * tokens * workload.model.dim / split


def gathered_bytes(workload: Workload, grid: Grid, software: Software) -> Floats:
    """The whole sequence beside its slice: input, gradient and result of a gathered branch."""
    if not software.sequence_parallel:
        return np.zeros(len(grid))
    tokens = grid.micro_batch * workload.sequence / grid.context
    return np.where(grid.tensor > 1, 3 * 2.0 * tokens * workload.model.dim, 0.0)


def logit_bytes(workload: Workload, grid: Grid, software: Software) -> Floats:
    """Logits, their fp32 form and its gradient, of the chunk of tokens that is at work."""
    tokens = grid.micro_batch * workload.sequence / grid.context
    logits = tokens * workload.model.vocab / grid.tensor
    return logits * (1.5 if software.chunked_loss else 10.0)


def flights(grid: Grid, micro_batches: Ints, position: Ints) -> tuple[Ints, Ints]:
    """Micro-batches that a pipeline position holds at once in each of its stages.

    Returns the number that all of its stages hold, and how many stages hold one more.
    """
    p, v, m = grid.pipeline, grid.virtual_stages, micro_batches
    code = {name: grid.schedule == i for i, name in enumerate(SCHEDULES)}
    chunks = np.minimum(2 * (p - position - 1) + (v - 1) * p + 1, m * v)
    every = np.select(
        [code["gpipe"], code["interleaved"], code["zero-bubble"], code["dualpipe"]],
        [m, chunks // v, np.minimum(m, p), np.minimum(m, p + 1)],
        np.minimum(m, p - position),
    )
    more = np.where(code["interleaved"] & (p > 1), chunks % v, 0)
    return np.where(p == 1, 1, every), more
