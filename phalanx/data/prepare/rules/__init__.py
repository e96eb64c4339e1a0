"""Quality and language rules as they were published, each a small function with its thresholds."""

from __future__ import annotations

from phalanx.data.prepare.rules import c4, fineweb, gopher, language, repetition
from phalanx.data.prepare.rules.registry import RULES, Outcome, Rule, chosen_rules

__all__ = [
    "RULES",
    "Outcome",
    "Rule",
    "c4",
    "chosen_rules",
    "fineweb",
    "gopher",
    "language",
    "repetition",
]
