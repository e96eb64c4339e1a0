"""Checks of a node, as functions that return evidence; nothing is repaired silently."""

from __future__ import annotations

from phalanx.doctor.finding import Finding, NodeReport, Verdict
from phalanx.doctor.node import CHECKS, CheckOptions, check_node

__all__ = ["CHECKS", "CheckOptions", "Finding", "NodeReport", "Verdict", "check_node"]
