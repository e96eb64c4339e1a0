"""A train step's output: the run that has made all steps, whichever attempt ended it."""

from __future__ import annotations

import json
from pathlib import Path

from phalanx.pipelines.run.training import RUNS, trained


def attempt(work: Path, name: str, reason: str, steps: tuple[int, ...]) -> Path:
    run = work / RUNS / "job" / name
    for step in steps:
        folder = run / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    run.mkdir(parents=True, exist_ok=True)
    if reason:
        (run / "exit_info.json").write_text(json.dumps({"reason": reason, "code": 0}))
    return run


def test_a_run_that_was_stopped_is_not_taken_for_done(tmp_path: Path) -> None:
    attempt(tmp_path, "1", "SIGTERM", (5,))
    attempt(tmp_path, "2", "", (5,))
    assert not trained(tmp_path, "run")


def test_the_folder_of_the_last_checkpoint_becomes_the_output_once(tmp_path: Path) -> None:
    attempt(tmp_path, "1", "", (5,))
    last = attempt(tmp_path, "2", "done", (10,))
    (last / "mark").touch()
    assert trained(tmp_path, "deep/run")
    assert (tmp_path / "deep" / "run" / "mark").exists()
    assert trained(tmp_path, "deep/run")  # killed between this and the rename of all


def test_an_attempt_that_found_all_steps_made_gives_the_one_that_made_them(tmp_path: Path) -> None:
    made = attempt(tmp_path, "1", "", (5, 10))
    (made / "mark").touch()
    attempt(tmp_path, "2", "done", ())
    assert trained(tmp_path, "run") and (tmp_path / "run" / "mark").exists()
