"""Bytes of activations that stay until backward.

Of each block and token, in elements of the compute format:

    attention  the norm's input, the branch's input, queries, keys, values and attended heads
    MLP        the norm's input, the branch's input, hidden widths before and after the gate
    experts    the norm's input, the router's in fp32, the shared experts' input; routed tokens as
               they arrive and as they return, and hidden widths, for each of top_k experts

Tensor parallelism divides what lies inside the branches, sequence parallelism the norms' inputs
as well. The branch's input is gathered: software that keeps it for the weights' gradient holds
the whole of it on every rank, software that gathers again in backward its slice. Attention that
is not fused keeps its scores: 5 bytes a head and key. Selective recompute drops what is cheap to
redo (the scores, or the results of elementwise work; of a block of experts, attention's alone),
full recompute all but a block's input.
"""

from __future__ import annotations

import numpy as np

from phalanx.config import is_gated
from phalanx.plan.grid import Floats, Grid, Ints
from phalanx.plan.workload import RECOMPUTES, SCHEDULES, Software, Workload

SCORE_BYTES = 5.0
ROUTER_INPUTS = 3  # the normed input for the experts, and in fp32 for the router
NARROW = ("fp8", "mxfp8", "nvfp4")  # keep the inputs of matmuls in one byte
CHUNK_BYTES = 2 << 30  # of logits that exist at once, where the loss is made in chunks


def block_bytes(
    workload: Workload, grid: Grid, software: Software, recompute: Ints, *, moe: bool
) -> Floats:
    """Bytes that one block keeps of one micro-batch, on one rank."""
    model = workload.model
    tokens = grid.micro_batch * workload.sequence / grid.context
    t = grid.tensor
    stream = 1.0 / t if software.sequence_parallel else np.ones(len(grid))
    gathers = software.sequence_parallel and software.keeps_gathered
    whole = np.ones(len(grid)) if gathers else stream
    attention = 2 * (model.dim * (stream + whole) + _head_elements(workload) / t)
    feed_forward = _feed_forward_bytes(workload, software, t, stream, whole, moe=moe)
    everything = attention + feed_forward
    if model.norm == "sandwich":
        everything = everything + 2 * 2 * model.dim * stream  # inputs of the norms on results
    if grid.precision in NARROW:
        everything = everything - _narrow_savings(workload, software, t, stream, moe=moe)
    if software.attention == "unfused":
        everything = everything + 2 * model.dim * stream  # masks of dropout, a byte each
        selective = everything
        everything = everything + SCORE_BYTES * model.heads / t * workload.sequence
    else:
        selective = _selective_bytes(workload, software, t, stream, whole, moe=moe)
        if moe:
            selective = selective + feed_forward
    if not software.fused:
        everything = everything * software.eager_kept
        selective = selective * 1.1
    full = 2 * model.dim * stream
    kept = np.select(
        [recompute == RECOMPUTES.index(name) for name in RECOMPUTES],
        [everything, selective, full],
    )
    return tokens * kept * (2 if grid.precision == "float32" else 1)


def _head_elements(workload: Workload) -> float:
    """Queries, keys, values and what they attend to, of a token."""
    model = workload.model
    if model.latent is not None:
        return float(model.heads * (2 * model.head_dim + 2 * model.latent.value_head_dim))
    return float((2 * model.heads + 2 * model.kv_heads) * model.head_dim)


def _feed_forward_bytes(
    workload: Workload, software: Software, t: Ints, stream: Floats, whole: Floats, *, moe: bool
) -> Floats:
    model = workload.model
    if not moe:
        return 2 * (model.dim * (stream + whole) + (_gates(workload) + 1) * model.ffn / t)
    experts = model.moe
    assert experts is not None
    # Each rank routes its own slice of the sequence: nothing is gathered.
    hidden = 3 * (experts.top_k * experts.ffn + experts.shared_ffn)
    routed = software.routed_copies * experts.top_k * model.dim
    router = ROUTER_INPUTS * model.dim + experts.experts * 2  # scores in fp32
    return 2 * (model.dim * stream + (router + routed + hidden) / t)


def _selective_bytes(
    workload: Workload, software: Software, t: Ints, stream: Floats, whole: Floats, *, moe: bool
) -> Floats:
    """The input, and the results of attention and of the products that are kept.

    Products over slices give sums that are whole until they are scattered; both are kept.
    """
    model, share = workload.model, software.selective_share
    branches = 1 if moe else 2
    sums = branches * model.dim * np.where(whole > stream, stream + whole, stream)
    hidden = 0.0 if moe else _gates(workload) * model.ffn
    products = share * (sums + (_head_elements(workload) + hidden) / t)
    return 2 * (model.dim * stream + products)


def _narrow_savings(
    workload: Workload, software: Software, t: Ints, stream: Floats, *, moe: bool
) -> Floats:
    """Bytes that inputs of matmuls in one byte instead of two leave out.

    Software that makes them again from what norms and gates were given keeps none of them.
    """
    model = workload.model
    value = model.latent.value_head_dim if model.latent else model.head_dim
    hidden = float(model.ffn)
    if moe:
        assert model.moe is not None
        hidden = model.moe.top_k * model.moe.ffn + model.moe.shared_ffn
    if software.remakes_narrow and not moe:
        return 2 * (2 * model.dim * stream + hidden / t)
    return 2 * model.dim * stream + (hidden + model.heads * value) / t


def _gates(workload: Workload) -> int:
    return 2 if is_gated(workload.model) else 1


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
    """Logits and what the loss makes of them.

    In chunks, whose gradients take the logits' place: one chunk of them, the head's gradient
    (summed in fp32 where there are several) and the last state with its gradient.
    """
    model, width = workload.model, 4 if grid.precision == "float32" else 2
    tokens = grid.micro_batch * workload.sequence / grid.context
    logits = tokens * model.vocab / grid.tensor
    if not software.chunked_loss:
        return logits * software.logit_bytes
    chunk = np.minimum(width * logits, CHUNK_BYTES)
    head = np.where(width * logits > chunk, 4 + width, width) * model.vocab * model.dim
    return chunk + head / grid.tensor + 2 * width * tokens * model.dim


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
