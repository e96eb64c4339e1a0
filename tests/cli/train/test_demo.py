"""The demo: text to checkpoint, as a newcomer runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.soak
def test_demo_in_json_is_one_document_a_line(tmp_path: Path) -> None:
    short = ["--set", "train.steps=3", "--set", "schedule.warmup_steps=0", "--json"]
    command = [sys.executable, "-m", "phalanx", "demo", *short]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2, 3]
    assert lines[-1]["kind"] == "exit" and Path(lines[-1]["run_folder"]).is_dir()


@pytest.mark.soak
def test_demo_trains_on_four_ranks_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    short = ["--set", "train.steps=3", "--set", "schedule.warmup_steps=0"]
    command = [sys.executable, "-m", "phalanx", "demo", *short]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 ranks: pipeline 2 x data 2" in done.stdout
    (run,) = (tmp_path / "runs" / "demo").iterdir()
    assert json.loads((run / "exit_info.json").read_text())["code"] == 0
    assert (run / "checkpoints" / "step-00000003" / "manifest.json").exists()
    assert len((run / "metrics" / "steps.jsonl").read_text().splitlines()) == 3


@pytest.mark.soak
def test_demo_with_kills_ends_with_a_verdict_in_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "phalanx", "demo", "--set", "train.steps=40", "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    verdict = lines[-1]
    assert (verdict["kind"], verdict["state"], verdict["identical"]) == ("recovery", "done", True)
    assert [each["what"] for each in verdict["incidents"]] == ["a worker", "a whole node"]
    assert all(each["lost_steps"] <= 1 for each in verdict["incidents"])
    assert all(0 < each["detected"] <= each["resumed"] for each in verdict["incidents"])
