"""Reasons: a code and its facts; decisions branch on members of ``Code``."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

import phalanx.cluster
import phalanx.simulate
from phalanx.cluster.gang.losses import LossNotice
from phalanx.cluster.gang.way_taken import WayTaken
from phalanx.cluster.jobs.feasibility import RuleBroken
from phalanx.cluster.jobs.leave_cause import LeaveCause
from phalanx.cluster.reasons import Reason, reason
from phalanx.cluster.recovery.own_failures import GivenUp
from phalanx.cluster.sentences import SENTENCES, TABLES


def test_a_stored_reason_still_tells_the_cause_that_it_was_made_from() -> None:
    why = LeaveCause.TIME_LIMIT.because(seconds=60, step=7)
    stored = msgspec.json.decode(msgspec.json.encode(why), type=Reason)
    assert stored == why == reason("time_limit", seconds=60, step=7)
    assert LeaveCause.of(stored) is LeaveCause.TIME_LIMIT
    assert WayTaken.of(stored) is None
    assert str(stored) == "ran into its time limit of 60 s at step 7"


def _decided_by(node: ast.AST) -> list[ast.expr]:
    """What a comparison, or a look into a table, depends on."""
    match node:
        case ast.Compare():
            return [node.left, *node.comparators]
        case ast.Subscript():
            return [node.slice]
        case ast.Call(func=ast.Attribute(attr="get" | "pop" | "setdefault")):
            return node.args[:1]
        case ast.Match():
            return [node.subject]
    return []


@pytest.mark.parametrize("room", [phalanx.cluster, phalanx.simulate])
def test_no_decision_compares_the_code_of_a_reason(room: ModuleType) -> None:
    assert room.__file__ is not None
    root = Path(room.__file__).parent
    compared = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in sorted(root.rglob("*.py"))
        if path.name != "reasons.py"
        for node in ast.walk(ast.parse(path.read_text()))
        for side in _decided_by(node)
        if isinstance(side, ast.Attribute) and side.attr == "code"
    ]
    assert compared == []


def test_a_code_has_one_sentence() -> None:
    assert sum(len(table) for table in TABLES) == len(SENTENCES)


def test_every_cause_that_a_decision_branches_on_has_a_sentence() -> None:
    assert {*GivenUp, *LeaveCause, *LossNotice, *RuleBroken, *WayTaken} <= SENTENCES.keys()
