"""The live chaos benchmark reads what ``phalanx chaos`` prints."""

from __future__ import annotations

import json

import msgspec
import pytest

from benchmarks.chaos import JOB, judged
from phalanx.cli.operate.chaos import verdict
from phalanx.config import check, load_job
from phalanx.testing.chaos.run import ChaosOutcome


def outcome(state: str, *differences: str) -> ChaosOutcome:
    return ChaosOutcome(
        plan="random, seed 0",
        done=["kill_worker"],
        state=state,
        seconds=9.0,
        generations=2,
        steps=30,
        differences=list(differences),
        left_over=[],
    )


def test_its_job_is_a_job_of_four_ranks() -> None:
    check(load_job(JOB), 4)


def test_plans_that_lost_something_and_leaks_are_counted() -> None:
    outcomes = [outcome("done"), outcome("failed"), outcome("done", "step 3: another loss")]
    printed = json.loads(msgspec.json.encode(verdict(outcomes, ["a port"])))
    assert judged(printed) == {"plans": 3, "plans_bad": 3}
    assert judged(json.loads(msgspec.json.encode(verdict(outcomes[:1], [])))) == {
        "plans": 1,
        "plans_bad": 0,
    }


def test_a_refusal_is_said_and_is_no_figure() -> None:
    with pytest.raises(SystemExit, match="refused"):
        judged({"error": "unknown key"})
