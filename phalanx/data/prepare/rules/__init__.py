"""Quality and language rules as they were published, each a small function with its thresholds."""

from __future__ import annotations

from phalanx.data.prepare.rules import c4, fineweb, gopher, language, repetition
from phalanx.data.prepare.rules.registry import RULES, FilterRule, Outcome, chosen_rules

__all__ = [
    "RULES",
    "FilterRule",
    "Outcome",
    "c4",
    "chosen_rules",
    "fineweb",
    "gopher",
    "language",
    "repetition",
]
