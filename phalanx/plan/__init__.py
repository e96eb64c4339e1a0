"""What a mapping costs: memory, step time, collectives, failures, money, and the search for it.

``propose(understand(Request(...)))`` is ``phalanx plan``; ``plan_of`` makes of its answer the
Plan that other rooms read. ``search`` chooses a mapping, ``predict`` prices one.
"""

from __future__ import annotations

from phalanx.plan.cost.constants import Constants, constants_toml, read_constants, shipped
from phalanx.plan.cost.failures import (
    FailureOutlook,
    FailureSettings,
    best_interval,
    failures_per_day,
    goodput,
    mtbf_seconds,
    outlook,
    spare_units,
    young_interval,
)
from phalanx.plan.cost.money import Bill, Range, bill
from phalanx.plan.cost.predict import Prediction, StageMemory, predict
from phalanx.plan.cost.traffic import AxisTraffic, traffic
from phalanx.plan.evidence.calibrate import Calibration, calibrate
from phalanx.plan.evidence.check import CheckReport, check_rows
from phalanx.plan.memory.model_counts import ParameterCount, StepFlops, flops_per_token, parameters
from phalanx.plan.question.emit import job_of, mapping_of, stage_workloads, workload_of
from phalanx.plan.question.request import PlanQuestion, PlanRequest, understand
from phalanx.plan.search.contract import Plan, plan_job, plan_of
from phalanx.plan.search.explain import Explanation, explain_plan
from phalanx.plan.search.proposal import PlanProposal, emitted, propose
from phalanx.plan.search.search import MappingCandidate, SearchResult, search
from phalanx.plan.search.space import Pins
from phalanx.plan.search.sweep import Sweep, sweep
from phalanx.plan.workload import Mapping, Software, Workload, usual_software

__all__ = [
    "AxisTraffic",
    "Bill",
    "Calibration",
    "CheckReport",
    "Constants",
    "Explanation",
    "FailureOutlook",
    "FailureSettings",
    "Mapping",
    "MappingCandidate",
    "ParameterCount",
    "Pins",
    "Plan",
    "PlanProposal",
    "PlanQuestion",
    "PlanRequest",
    "Prediction",
    "Range",
    "SearchResult",
    "Software",
    "StageMemory",
    "StepFlops",
    "Sweep",
    "Workload",
    "best_interval",
    "bill",
    "calibrate",
    "check_rows",
    "constants_toml",
    "emitted",
    "explain_plan",
    "failures_per_day",
    "flops_per_token",
    "goodput",
    "job_of",
    "mapping_of",
    "mtbf_seconds",
    "outlook",
    "parameters",
    "plan_job",
    "plan_of",
    "predict",
    "propose",
    "read_constants",
    "search",
    "shipped",
    "spare_units",
    "stage_workloads",
    "sweep",
    "traffic",
    "understand",
    "usual_software",
    "workload_of",
    "young_interval",
]
