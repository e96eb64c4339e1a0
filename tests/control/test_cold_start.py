"""An agent without work costs little, and becomes the whole agent when there is some."""

from __future__ import annotations

import subprocess
import sys

import pytest

from phalanx.control.cold_start import waited_for_work

HEAVY = ("torch", "numpy", "pydantic", "typer", "phalanx.checkpoint", "phalanx.plan")


def test_it_loads_nothing_that_only_work_needs() -> None:
    program = (
        f"import sys, phalanx.control.cold_start; print([m for m in {HEAVY} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "words",
    [
        ["--join", "http://a:1"],
        ["--no-standby"],
        ["--no-standby", "--join", "http://a:1", "--gpus", "many"],
        ["--no-standby", "--join", "http://a:1", "--nosuch", "1"],
    ],
    ids=["not-asked", "no-server", "bad-number", "unknown"],
)
def test_what_only_the_command_line_can_explain_is_left_to_it(words: list[str]) -> None:
    assert waited_for_work(words) == words


def test_a_missing_token_is_named() -> None:
    words = ["agent", "--no-standby", "--join", "http://127.0.0.1:9", "--gpus", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={
            "PHALANX_TOKEN_FILE": "/nowhere/token",
            "HOME": "/tmp",
            "PYTHONPATH": ":".join(sys.path),
        },
    )
    assert done.returncode == 1 and "error: no token: /nowhere/token" in done.stderr
