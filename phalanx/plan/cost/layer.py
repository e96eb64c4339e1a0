"""Time of one block, of the embedding and of the head, on one rank for one micro-batch.

Everything is an array over distinct (tensor, context, expert, micro-batch) tuples. ``tokens`` is
what a tensor group works on together: micro_batch * sequence / context.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.config import is_gated
from phalanx.plan.cost.attention import attention_seconds
from phalanx.plan.cost.constants import Constants
from phalanx.plan.cost.matmul import matmul_seconds
from phalanx.plan.grid import Floats
from phalanx.plan.machine import Machine
from phalanx.plan.workload import Precision, Software, Workload

NARROW = ("fp8", "mxfp8", "nvfp4")


@dataclass(frozen=True)
class Split:
    """Distinct ways to divide a block: one entry each."""

    tensor: Floats
    context: Floats
    expert: Floats
    micro_batch: Floats


@dataclass(frozen=True)
class BlockTime:
    """Seconds of a block in forward; backward is split into the same parts."""

    matmul: Floats
    attention: Floats
    elementwise: Floats
    matmul_backward: Floats
    attention_backward: Floats
    elementwise_backward: Floats
    routing: float = 0.0  # of the elementwise part of each direction: where tokens go

    @property
    def forward(self) -> Floats:
        return self.matmul + self.attention + self.elementwise

    @property
    def backward(self) -> Floats:
        return self.matmul_backward + self.attention_backward + self.elementwise_backward


@dataclass(frozen=True)
class Pricing:
    """What every term needs to know beside the shapes."""

    workload: Workload
    machine: Machine
    software: Software
    constants: Constants
    precision: Precision

    @property
    def width(self) -> float:
        """Bytes of one activation."""
        return 4.0 if self.precision == "float32" else 2.0

    @property
    def gathered_width(self) -> float:
        """Bytes of one weight that is gathered."""
        narrow = self.software.narrow_gathers and self.precision in NARROW
        return 1.0 if narrow else self.width

    def memory_seconds(self, nbytes: Floats) -> Floats:
        """Elementwise passes over this many bytes, if they were fused."""
        passes = 1.0 if self.software.fused else self.constants.eager
        return nbytes * passes / (self.machine.memory_bandwidth * self.constants.memory)


def tokens_of(split: Split, workload: Workload) -> Floats:
    """Tokens of a micro-batch in one tensor group."""
    return split.micro_batch * workload.sequence / split.context


def block_time(split: Split, pricing: Pricing, *, moe: bool) -> BlockTime:
    """One transformer block."""
    model, software = pricing.workload.model, pricing.software
    tokens, t = tokens_of(split, pricing.workload), split.tensor
    total = _Sum(pricing)
    if model.latent is None:
        projected = (model.heads + 2 * model.kv_heads) * model.head_dim / t
        total.matmul(tokens, projected, model.dim, normed=True)
        total.matmul(tokens, model.dim, model.heads * model.head_dim / t)
        rotated = 2 * (model.heads + model.kv_heads) * model.head_dim / t
    else:
        latent = model.latent
        query_rows = model.heads * model.head_dim / t
        if latent.query_rank:
            total.matmul(tokens, latent.query_rank, model.dim, normed=True)
        total.matmul(tokens, query_rows, latent.query_rank or model.dim)
        compressed = latent.key_value_rank + latent.rope_head_dim
        total.matmul(tokens, compressed, model.dim, normed=True)
        up = model.heads * (latent.content_head_dim + latent.value_head_dim) / t
        total.matmul(tokens, up, latent.key_value_rank)
        total.matmul(tokens, model.dim, model.heads * latent.value_head_dim / t)
        rotated = 4 * query_rows + 2 * up  # queries and keys are put together from two parts
    if moe:
        hidden = _expert_matmuls(total, split, pricing)
    else:
        gates = 2 if is_gated(model) else 1
        total.matmul(tokens, gates * model.ffn / t, model.dim, normed=True)
        total.matmul(tokens, model.dim, model.ffn / t)
        hidden = (gates + 1) * model.ffn / t * tokens
    # Two norms and two residual sums read and write the stream; sequence parallelism splits it.
    passes = 14 if model.norm == "sandwich" else 10
    stream = passes * model.dim / (t if software.sequence_parallel else 1.0)
    elements = tokens * (stream + rotated) + hidden
    forward = pricing.memory_seconds(pricing.width * elements)
    backward = pricing.memory_seconds(pricing.width * 1.5 * elements)
    kernels = pricing.constants.kernel_seconds * _passes(software)
    routing = pricing.constants.expert_seconds if moe and not software.fused_experts else 0.0
    kernels += routing
    attended = attention_seconds(split, pricing)
    return BlockTime(
        total.forward,
        attended[0],
        forward + total.casts + kernels,
        total.backward,
        attended[1],
        backward + total.casts_backward + kernels,
        routing,
    )


def _passes(software: Software) -> int:
    """Memory-bound kernels of a block in one direction."""
    return 8 if software.fused else 16


def block_launches(pricing: Pricing, *, moe: bool) -> float:
    """Kernels that the host starts for one block in forward: passes, products and attention."""
    latent = pricing.workload.model.latent is not None
    products = (5 if latent else 2) + (2 if not moe else 5)
    routing = 0 if not moe else 6 if pricing.software.fused_experts else 16
    casts = 2 * products if pricing.precision in NARROW else 0
    return float(_passes(pricing.software) + products + 1 + routing + casts)


def head_time(split: Split, pricing: Pricing) -> BlockTime:
    """The output head with its loss, and the embedding (a gather, and a scatter of gradients)."""
    model = pricing.workload.model
    tokens = tokens_of(split, pricing.workload)
    total = _Sum(pricing)
    narrow = pricing.precision if pricing.precision not in NARROW else "bfloat16"
    total.matmul(tokens, model.vocab / split.tensor, model.dim, narrow)
    logits = tokens * model.vocab / split.tensor
    # Bytes a logit: fused, read and cast once; else fp32 copies for maximum, exponential, sum.
    passes = 8.0 if pricing.software.chunked_loss and pricing.software.fused else 16.0
    bandwidth = pricing.machine.memory_bandwidth * pricing.constants.memory
    nothing = np.zeros_like(tokens)
    return BlockTime(
        total.forward,
        nothing,
        passes * logits / bandwidth,
        total.backward,
        nothing,
        passes * logits / bandwidth,
    )


def _expert_matmuls(total: _Sum, split: Split, pricing: Pricing) -> Floats:
    """Router, shared and routed experts; returns the elements that are passed over."""
    model = pricing.workload.model
    moe = model.moe
    assert moe is not None
    here = tokens_of(split, pricing.workload) / split.tensor  # the tensor axis splits tokens
    total.matmul(here, moe.experts, model.dim, "bfloat16")
    if moe.shared_ffn:
        total.matmul(here, 2 * moe.shared_ffn, model.dim)
        total.matmul(here, model.dim, moe.shared_ffn)
    load = imbalance(split.expert, pricing.workload)
    routed = here * moe.top_k * load
    experts = moe.experts / split.expert
    for width, depth in ((2 * moe.ffn, model.dim), (model.dim, moe.ffn)):
        total.grouped(routed / experts, width, depth, experts)
    # Gate and up are read and their product written; rows are permuted in, weighted and summed.
    activation = 0 if pricing.software.fused_experts else 3 * moe.ffn
    return routed * (activation + 6 * model.dim) + here * 3 * moe.shared_ffn


def imbalance(expert: Floats, workload: Workload) -> Floats:
    """Load of the busiest expert rank over the mean: an order statistic.

    Loads of experts spread by ``routing_skew``; a rank averages over its own, and the slowest of
    ``expert`` ranks is about sqrt(2 ln n) deviations above the mean.
    """
    assert workload.model.moe is not None
    own = workload.model.moe.experts / expert
    spread = workload.routing_skew / np.sqrt(own)
    late: Floats = 1 + spread * np.sqrt(2 * np.log(np.maximum(expert, 1.0)))
    return late


class _Sum:
    """Adds up matrix products: forward once, backward by input and by weight."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing = pricing
        self.forward: Floats = np.zeros(1)
        self.backward: Floats = np.zeros(1)
        self.casts: Floats = np.zeros(1)
        self.casts_backward: Floats = np.zeros(1)

    def matmul(
        self,
        m: Floats,
        n: Floats | float,
        k: Floats | float,
        precision: Precision | None = None,
        *,
        normed: bool = False,
    ) -> None:
        """One product; ``normed``: of what a norm has written."""
        precision = precision or self.pricing.precision
        self._add(m, n, k, precision)
        if precision in NARROW:
            self._cast(m, n, k, fused=normed and self.pricing.software.fused_casts)

    def grouped(
        self, m: Floats, n: Floats | float, k: Floats | float, experts: Floats | float
    ) -> None:
        """A product of each expert."""
        pricing, precision = self.pricing, self.pricing.precision
        if pricing.software.fused_experts:
            # It deals out the tiles of all experts at the speed of one product, and casts itself.
            self._add(m, n, k, precision, together=experts)
            return
        constants = pricing.constants
        # The host has just waited for the sizes: it has launched nothing ahead.
        least = 0.0 if pricing.software.experts_together else constants.expert_launch_seconds
        self._add(m, n, k, precision, experts, pace=constants.expert_matmul, least=least)
        if precision in NARROW:
            self._cast(experts * m, n, k)

    def _add(
        self,
        m: Floats,
        n: Floats | float,
        k: Floats | float,
        precision: Precision,
        times: Floats | float = 1.0,
        together: Floats | float = 1.0,
        *,
        pace: float = 1.0,
        least: float = 0.0,
    ) -> None:
        """So many (``times``) at a share of a large one's speed, each ``least`` seconds or more."""
        pricing = self.pricing
        n, k = np.asarray(n, dtype=np.float64), np.asarray(k, dtype=np.float64)
        aligned = (n % 64 == 0) & (k % 64 == 0)

        def seconds(m: Floats, n: Floats, k: Floats) -> Floats:
            rest = (pricing.machine, precision, pricing.constants, together, aligned)
            one = np.maximum(matmul_seconds(m, n, k, *rest) / pace, least)
            return times * one + pricing.constants.kernel_seconds

        self.forward = self.forward + seconds(m, n, k)
        self.backward = self.backward + seconds(m, k, n)
        if pricing.workload.trains == "all":
            self.backward = self.backward + seconds(n, k, m)

    def _cast(
        self, m: Floats, n: Floats | float, k: Floats | float, *, fused: bool = False
    ) -> None:
        """Read in 16 bits and written in two layouts; ``fused``: where it is made, unread."""
        self.casts = self.casts + self.pricing.memory_seconds((2.0 if fused else 4.0) * m * k)
        self.casts_backward = self.casts_backward + self.pricing.memory_seconds(4.0 * m * n)
