"""What a mapping costs: memory, step time, collectives, and the search for the best mapping."""

from __future__ import annotations

from phalanx.plan.constants import Constants, shipped
from phalanx.plan.counts import ParameterCount, StepFlops, flops_per_token, parameters
from phalanx.plan.predict import Prediction, StageMemory, predict
from phalanx.plan.search import Candidate, SearchResult, search
from phalanx.plan.space import Pins
from phalanx.plan.workload import Mapping, Software, Workload

__all__ = [
    "Candidate",
    "Constants",
    "Mapping",
    "ParameterCount",
    "Pins",
    "Prediction",
    "SearchResult",
    "Software",
    "StageMemory",
    "StepFlops",
    "Workload",
    "flops_per_token",
    "parameters",
    "predict",
    "search",
    "shipped",
]
