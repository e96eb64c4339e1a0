"""Time of softmax(q k^T) v by kernel family.

Fused kernels work through the lower half of the score matrix at a share of the 16-bit peak:

    forward FLOPs = 2 * tokens * (sequence + depth) * heads * (key + value width) / 2

and backward 2.5 times as many, of which layers with a sliding window compute their share;
``depth`` is what tiles on the diagonal, of which half is thrown away, and the ends of rows cost, in
tokens of the sequence.

The unfused form multiplies the whole matrix and passes over the scores in memory: softmax and
dropout forward (9 bytes a score) and backward (11), beside what the products write and read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from phalanx.plan.cost.constants import Constants
from phalanx.plan.grid import Floats
from phalanx.plan.machine import Machine
from phalanx.plan.memory.model_counts import attended_share

if TYPE_CHECKING:
    from phalanx.plan.cost.layer import Pricing, Split

# Rate of heads of 64 over those of 128: 0.78 on Hopper (cuDNN on an H200), 0.9 on Ampere.
NARROW_EXPONENT = {"volta": 0.1, "ampere": 0.15}
SCORE_BYTES_FORWARD = 9.0
SCORE_BYTES_BACKWARD = 11.0


def attention_seconds(split: Split, pricing: Pricing) -> tuple[Floats, Floats]:
    """Forward and backward of one block's attention, on one rank."""
    model, sequence = pricing.workload.model, pricing.workload.sequence
    value = model.latent.value_head_dim if model.latent is not None else model.head_dim
    tokens = split.micro_batch * sequence / split.context
    heads = model.heads / split.tensor
    full = 2.0 * tokens * sequence * heads * (model.head_dim + value)
    if pricing.software.attention == "unfused":
        return _unfused(full, tokens * sequence * heads, pricing)
    forward_rate, backward_rate = attention_rates(
        pricing.machine, pricing.software.attention, model.head_dim, pricing.constants
    )
    gap = pricing.constants.kernel_seconds
    work = (
        full
        / 2
        * attended_share(model, sequence)
        * (1 + pricing.constants.attention_depth / sequence)
    )
    forward = work / forward_rate + gap
    backward = 2.5 * work / backward_rate + 2 * gap
    return forward, backward


def attention_rates(
    machine: Machine, kernel: str, head_dim: int, constants: Constants
) -> tuple[float, float]:
    """FLOP/s of the fused kernel for heads of this width, forward and backward."""
    key, narrow = f"{machine.family}:{kernel}", 1.0
    share = constants.attention.get(f"{key}:{head_dim}")
    if share is None:
        share = constants.attention.get(key, constants.attention["default"])
        # Narrow heads leave the exponential as the bottleneck, the more so the faster matmuls are.
        exponent = NARROW_EXPONENT.get(machine.family, 0.35)
        narrow = min(1.0, (head_dim / 128) ** exponent)
    forward = machine.peak("bfloat16") * min(1.0, share * float(machine.power**constants.power))
    backward = constants.attention_backward_of.get(
        f"{key}:{head_dim}", constants.attention_backward
    )
    return forward * narrow, forward * narrow * backward


def _unfused(full: Floats, scores: Floats, pricing: Pricing) -> tuple[Floats, Floats]:
    from phalanx.plan.cost.matmul import sustained_rate

    model, machine, constants = pricing.workload.model, pricing.machine, pricing.constants
    precision = pricing.precision if pricing.precision in ("float16", "bfloat16") else "bfloat16"
    depth = model.head_dim / (model.head_dim + constants.matmul_depth)
    aligned = 1.0 if model.head_dim % 8 == 0 else constants.misaligned**2
    rate = sustained_rate(machine, precision, constants) * depth * aligned
    bandwidth = machine.memory_bandwidth * constants.memory
    products = np.maximum(full / rate, 2 * 2.0 * scores / bandwidth)
    passes = scores / bandwidth
    forward = products + SCORE_BYTES_FORWARD * passes + 6 * constants.kernel_seconds
    backward = 2 * products + SCORE_BYTES_BACKWARD * passes + 8 * constants.kernel_seconds
    return forward, backward
