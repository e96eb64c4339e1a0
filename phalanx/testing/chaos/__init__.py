"""Faults on purpose: plans, the injector, and the verdict on the job."""

from __future__ import annotations

from phalanx.testing.chaos.plan import Action, ChaosPlan, also_drawn, random_plan, read_plan
from phalanx.testing.chaos.run import ChaosCluster, ChaosOutcome
from phalanx.testing.chaos.verdict import compare

__all__ = [
    "Action",
    "ChaosCluster",
    "ChaosOutcome",
    "ChaosPlan",
    "also_drawn",
    "compare",
    "random_plan",
    "read_plan",
]
