"""A trial as a point of a scaling law: its parameters, tokens and compute."""

from __future__ import annotations

from phalanx.config import Job, run_tokens
from phalanx.plan.memory.model_counts import flops_per_token, parameters
from phalanx.plan.sweeps.scaling_law import ScalingPoint


def scaling_point(job: Job, loss: float) -> ScalingPoint:
    """Parameters are those that a token computes with: all active ones but the embedding's."""
    counts = parameters(job.model)
    tokens = run_tokens(job)
    return ScalingPoint(
        parameters=float(counts.active - counts.embedding),
        tokens=float(tokens),
        flops=float(flops_per_token(job.model, job.data.sequence).model_flops * tokens),
        loss=loss,
    )
