"""Where the kinds of work of a plan stand under the roof of its GPU."""

from __future__ import annotations

from phalanx.config import Model, is_gated
from phalanx.hardware import Cluster
from phalanx.plan.cost.constants import Constants
from phalanx.plan.cost.predict import Prediction
from phalanx.plan.machine import machine_of
from phalanx.plan.memory.model_counts import flops_per_token
from phalanx.plan.show.plot import Kernel

# A memory-bound pass does about one operation on each 16-bit value that it moves.
PASS_FLOPS_PER_BYTE = 0.5


def kernels(prediction: Prediction, cluster: Cluster, constants: Constants) -> tuple[Kernel, ...]:
    """Matrix products, attention and memory-bound passes: intensity and speed on one GPU."""
    workload, mapping, parts = prediction.workload, prediction.mapping, prediction.parts
    model = workload.model
    tokens = workload.tokens / prediction.gpus
    whole = flops_per_token(model, workload.sequence).model_flops
    products = flops_per_token(model, 0).model_flops
    attention = whole - products
    here = mapping.micro_batch * workload.sequence / mapping.context
    machine = machine_of(cluster, prediction.gpus)
    passes = PASS_FLOPS_PER_BYTE * machine.memory_bandwidth * constants.memory
    listed = [
        Kernel(
            "matmul",
            matmul_intensity(model, here, mapping.tensor),
            products * tokens / parts["matmul"],
        )
    ]
    if parts.get("attention"):
        listed.append(
            Kernel(
                "attention",
                attention_intensity(model, workload.sequence),
                attention * tokens / parts["attention"],
            )
        )
    listed.append(Kernel("elementwise", PASS_FLOPS_PER_BYTE, passes))
    return tuple(listed)


def matmul_intensity(model: Model, tokens: float, tensor: int) -> float:
    """FLOP per byte of a block's products in 16 bits, operands and results moved once."""
    width = model.dim
    inner = (model.heads + 2 * model.kv_heads) * model.head_dim / tensor
    if model.moe is not None:
        hidden = float(model.moe.ffn)
        rows = tokens / tensor * model.moe.top_k / model.moe.experts
    else:
        hidden, rows = model.ffn / tensor, tokens
    gates = 2 if is_gated(model) or model.moe is not None else 1
    shapes = [
        (tokens, inner, width),
        (tokens, width, model.heads * model.head_dim / tensor),
        (rows, gates * hidden, width),
        (rows, width, hidden),
    ]
    flops = sum(2 * m * n * k for m, n, k in shapes)
    moved = sum(2 * (m * k + k * n + m * n) for m, n, k in shapes)
    return flops / moved


def attention_intensity(model: Model, sequence: int) -> float:
    """FLOP per byte of fused attention: queries, keys, values and results moved once."""
    scores = 2 * sequence * model.heads * model.head_dim  # causal half of queries and values
    moved = 2 * (2 * model.heads + 2 * model.kv_heads) * model.head_dim
    return scores / moved
