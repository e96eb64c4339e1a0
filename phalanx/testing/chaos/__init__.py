"""Harm on purpose: plans of it, what does it, and the verdict on what came of it."""

from __future__ import annotations

from phalanx.testing.chaos.plan import Action, Plan, also_drawn, random_plan, read_plan
from phalanx.testing.chaos.run import Arena, Outcome
from phalanx.testing.chaos.verdict import compare

__all__ = [
    "Action",
    "Arena",
    "Outcome",
    "Plan",
    "also_drawn",
    "compare",
    "random_plan",
    "read_plan",
]
