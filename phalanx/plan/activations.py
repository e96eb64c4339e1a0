"""Estimate of the activations that one rank keeps for backward."""

from __future__ import annotations

from phalanx.config import Job, Model, micro_batches


def activation_bytes(job: Job, position: int, layers: list[int]) -> int:
    """Peak over the step for a pipeline position whose stages have these numbers of layers.

    Counts what autograd keeps of each block, in the compute precision, for every micro-batch
    in flight under the schedule.
    """
    width = 4 if job.precision.compute == "float32" else 2
    tokens = job.train.micro_batch * job.data.sequence // job.parallel.context
    per_layer = layer_elements(job.model, job.memory.recompute, job.parallel.tensor) * width
    flights = in_flight(job, position)
    kept = sum(count * n for count, n in zip(flights, layers, strict=True))
    return int(kept * tokens * per_layer)


def layer_elements(model: Model, recompute: str, tensor: int) -> float:
    """Elements that one block keeps per token on one rank."""
    dim = model.dim
    if model.latent is not None:
        latent = model.latent
        heads = model.heads * (
            2 * (latent.content_head_dim + latent.rope_head_dim) + 2 * latent.value_head_dim
        )
    else:
        heads = (2 * model.heads + 2 * model.kv_heads) * model.head_dim
    hidden = model.ffn
    if model.moe is not None:
        hidden = model.moe.top_k * model.moe.ffn + model.moe.shared_ffn
    gates = 2 if model.mlp == "swiglu" else 1
    if recompute == "full":
        return dim / tensor
    if recompute == "selective":  # input and the results of matmuls and attention
        return (3 * dim + heads + gates * hidden) / tensor
    # Gathered inputs of the two branches are whole on every tensor-parallel rank.
    gathered = 2 * dim if tensor > 1 else 0
    return (4 * dim + heads + (gates + 1) * hidden) / tensor + gathered


def in_flight(job: Job, position: int) -> list[int]:
    """Micro-batches whose activations a pipeline position holds at once, for each of its stages."""
    axes, count = job.parallel, micro_batches(job)
    if axes.pipeline == 1:
        return [1]
    if axes.schedule == "gpipe":
        return [count]
    if axes.schedule == "1f1b":
        return [min(count, axes.pipeline - position)]
    if axes.schedule == "zero-bubble":  # each half of the V is as long as the pipeline
        return [min(count, axes.pipeline)] * 2
    warmup = 2 * (axes.pipeline - position - 1) + (axes.virtual_stages - 1) * axes.pipeline + 1
    chunks = min(warmup, count * axes.virtual_stages)
    even, rest = divmod(chunks, axes.virtual_stages)
    return [even + (turn < rest) for turn in range(axes.virtual_stages)]
