"""Checkpoints of a run are scored as they appear, each once, until the run has ended."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from phalanx.config import ConfigError
from phalanx.train.evaluate.plan import EvaluationPlan
from phalanx.train.evaluate.run import ModelPlace
from phalanx.train.evaluate.scores import Scores, read_scores
from phalanx.train.evaluate.watch import watch_run
from phalanx.train.exits import ExitCode, ExitInfo, now
from phalanx.train.report.records import EvaluationRecord, read_records
from phalanx.train.report.run_folder import RunFolder, create
from tests.train.forked_runs import small_job


def ended(folder: RunFolder) -> None:
    info = ExitInfo(code=ExitCode.DONE, reason="done", message="", step=9, finished=now())
    folder.write_exit(info)


def test_each_checkpoint_is_scored_once_until_the_run_ends(
    tmp_path: Path, checkpoint: Path, corpus: Path
) -> None:
    folder = create(small_job(tmp_path))
    shutil.copytree(checkpoint, folder.checkpoints / "step-00000007")
    told: list[Scores] = []

    def seen(found: Scores) -> None:
        told.append(found)
        if len(told) == 1:  # the next one is saved, and then the run ends
            shutil.copytree(checkpoint, folder.checkpoints / "step-00000009")
            ended(folder)

    place = ModelPlace(checkpoint=str(folder.path.parent), device="cpu")
    plan = EvaluationPlan(perplexity={"all": str(corpus)}, limit=1)
    watch_run(place, plan, seen, look_seconds=0.0)
    files = sorted(path.name for path in folder.scores.iterdir())
    assert files == ["step-00000007.json", "step-00000009.json"] and len(told) == 2
    assert read_scores(folder.scores / files[0]) == told[0]
    records = list(read_records(folder.evaluation, EvaluationRecord))
    assert [record.scores for record in records] == [each.scores for each in told]
    watch_run(place, plan, seen, look_seconds=0.0)
    assert len(told) == 2


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    place = ModelPlace(checkpoint=str(tmp_path), device="cpu")
    with pytest.raises(ConfigError, match="is not a run's folder"):
        watch_run(place, EvaluationPlan(perplexity={"a": "b"}), lambda found: None)
