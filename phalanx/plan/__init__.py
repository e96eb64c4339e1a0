"""What a mapping costs: memory, step time, collectives, and the search for the best mapping."""

from __future__ import annotations

from phalanx.plan.calibrate import Calibration, calibrate
from phalanx.plan.check import CheckReport, check_rows
from phalanx.plan.constants import Constants, constants_toml, read_constants, shipped
from phalanx.plan.counts import ParameterCount, StepFlops, flops_per_token, parameters
from phalanx.plan.predict import Prediction, StageMemory, predict
from phalanx.plan.search import Candidate, SearchResult, search
from phalanx.plan.space import Pins
from phalanx.plan.workload import Mapping, Software, Workload

__all__ = [
    "Calibration",
    "Candidate",
    "CheckReport",
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
    "calibrate",
    "check_rows",
    "constants_toml",
    "flops_per_token",
    "parameters",
    "predict",
    "read_constants",
    "search",
    "shipped",
]
