"""`phalanx coord-check`: a line an activation, and exit code 1 where one depends on the width."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import run_phalanx

JOB = """
[model]
dim = 32
layers = 1
heads = 2
ffn = 64
vocab = 64

[optimizer]
learning_rate = 1e-2
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return str(path)


def test_what_depends_on_the_width_is_told(job: str) -> None:
    done = run_phalanx("coord-check", job, "--widths", "32,128", "--steps", "1", "--json")
    found = {one["name"]: one for one in json.loads(done.stdout)}
    assert len(found["logits"]["moved"]) == 2
    assert done.returncode == (0 if all(one["steady"] for one in found.values()) else 1)


@pytest.mark.parametrize("widths", ["64", "128,64", "64,x"])
def test_widths_that_say_nothing_are_refused(job: str, widths: str) -> None:
    done = run_phalanx("coord-check", job, "--widths", widths)
    assert done.returncode == 2 and "--widths" in done.stderr + done.stdout
