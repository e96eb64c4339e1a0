"""Rows of the speed comparison: each is a job that can be trained, and has a claim."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from phalanx.plan.memory.model_counts import parameters
from proof.claims import CLAIMS

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Modules that the comparison runs by their path, since torchtitan has a process of its own."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return {name: importlib.import_module(name) for name in ("speed_shape", "speed_phalanx")}


def test_every_row_is_a_job_and_has_a_claim(sides: dict[str, Any]) -> None:
    rows = sides["speed_shape"].ROWS
    commands = {name: claim.command for name, claim in CLAIMS.items() if name.startswith("speed-")}
    assert {name.removeprefix("speed-") for name in commands} == set(rows)
    for name in rows:
        assert f"--row {name} " in commands[f"speed-{name}"]
        job = sides["speed_phalanx"].job(sides["speed_shape"].row(name))
        assert job.train.micro_batch == job.train.global_batch and not job.model.tied_embedding


def test_the_mixture_is_the_one_that_was_published(sides: dict[str, Any]) -> None:
    row = sides["speed_shape"].row("moe")
    moe = row.model.moe
    assert (row.model.dim, row.model.layers, row.sequence, row.batch) == (2048, 12, 4096, 4)
    assert (moe.experts, moe.top_k, moe.ffn) == (48, 8, 768)
    assert 3e9 < parameters(row.model).total < 4e9
