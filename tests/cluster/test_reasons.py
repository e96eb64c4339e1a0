"""Reasons: a code and its facts; decisions branch on members of ``Code``."""

from __future__ import annotations

import ast
from pathlib import Path

import msgspec

import phalanx.cluster
from phalanx.cluster.jobs.leave_cause import LeaveCause
from phalanx.cluster.reasons import Reason, reason
from phalanx.cluster.recovery.way_taken import WayTaken


def test_a_stored_reason_still_tells_the_cause_that_it_was_made_from() -> None:
    why = LeaveCause.TIME_LIMIT.because(seconds=60, step=7)
    stored = msgspec.json.decode(msgspec.json.encode(why), type=Reason)
    assert stored == why == reason("time_limit", seconds=60, step=7)
    assert LeaveCause.of(stored) is LeaveCause.TIME_LIMIT
    assert WayTaken.of(stored) is None
    assert str(stored) == "ran into its time limit of 60 s at step 7"


def test_no_decision_of_the_core_compares_the_code_of_a_reason() -> None:
    root = Path(phalanx.cluster.__file__).parent
    compared = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in sorted(root.rglob("*.py"))
        if path.name != "reasons.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
        if isinstance(side, ast.Attribute) and side.attr == "code"
    ]
    assert compared == []
