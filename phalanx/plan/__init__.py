"""What a mapping costs: exact counts of parameters and FLOPs, from the configuration alone."""

from __future__ import annotations

from phalanx.plan.counts import ParameterCount, StepFlops, flops_per_token, parameters

__all__ = ["ParameterCount", "StepFlops", "flops_per_token", "parameters"]
