"""Checks of a node, as functions that return evidence; nothing is repaired silently."""

from __future__ import annotations

from phalanx.doctor.finding import Finding, Report, Verdict
from phalanx.doctor.node import CHECKS, Patient, check_node

__all__ = ["CHECKS", "Finding", "Patient", "Report", "Verdict", "check_node"]
