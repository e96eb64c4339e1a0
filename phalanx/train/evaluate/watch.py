"""Evaluate each checkpoint of a run as it appears, on machines other than those that train."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from phalanx.checkpoint import list_checkpoints
from phalanx.checkpoint.format.tier import step_of
from phalanx.config import ConfigError
from phalanx.train.evaluate.plan import EvaluationPlan
from phalanx.train.evaluate.run import EvaluationError, ModelPlace, evaluate_checkpoint
from phalanx.train.evaluate.scores import Scores, write_scores
from phalanx.train.report.records import EvaluationRecord
from phalanx.train.report.run_folder import RunFolder
from phalanx.train.report.sinks import JsonLines

LOOK_SECONDS = 10.0  # between two looks for a new checkpoint


def watch_run(
    place: ModelPlace,
    plan: EvaluationPlan,
    seen: Callable[[Scores], None],
    look_seconds: float = LOOK_SECONDS,
) -> None:
    """Evaluate the checkpoints of the run at ``place.checkpoint`` until the run has ended.

    Scores are written into its folder, and told. Steps that have some are left alone, and so are
    checkpoints that retention removes before their turn.
    """
    folder = _run_folder(Path(place.checkpoint))
    while True:
        ended = folder.read_exit() is not None  # asked first: nothing is saved after the end
        for path in list_checkpoints(folder.checkpoints):
            file = folder.scores / f"step-{step_of(path.name):08d}.json"
            if file.exists():
                continue
            began = time.monotonic()
            try:
                scores = evaluate_checkpoint(
                    msgspec.structs.replace(place, checkpoint=str(path)), plan
                )
            except EvaluationError:
                if path.exists():
                    raise
                continue
            write_scores(file, scores)
            _record(folder, scores, time.monotonic() - began)
            seen(scores)
        if ended:
            return
        time.sleep(look_seconds)


def _run_folder(path: Path) -> RunFolder:
    """The run named, or the newest of a name."""
    runs = sorted(each.parents[1] for each in path.glob("*/config/job.json"))
    chosen = path if (path / "config" / "job.json").exists() else runs[-1] if runs else None
    if chosen is None:
        rule = "is not a run's folder"
        raise ConfigError("checkpoint", f'"{path}"', rule, "give one that `phalanx runs ls` lists")
    return RunFolder(chosen)


def _record(folder: RunFolder, found: Scores, seconds: float) -> None:
    """Append the scores to the run's metrics."""
    sink = JsonLines(folder)
    record = EvaluationRecord(
        job=folder.path.parent.name,
        generation=0,
        step=found.step,
        scores=found.scores,
        problems=found.problems,
        seconds=seconds,
    )
    sink.write(record)
    sink.close()
