"""What an attempt finds of one that was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cluster.pipelines.description import PipelineStep
from phalanx.cluster.pipelines.step_order import StepOrder
from phalanx.pipelines.run.content import ContentCache
from phalanx.pipelines.run.step_work import StepWork
from phalanx.pipelines.run.workspace import Workspace


@pytest.mark.parametrize(
    ("step", "goes_on"),
    [
        (PipelineStep(kind="train", job="job.toml"), True),
        (PipelineStep(kind="data", command=("prepare", "recipe.toml")), True),
        (PipelineStep(kind="data", command=("tokenize", "text")), True),
        (PipelineStep(kind="data", command=("pack", "corpus")), False),
        (PipelineStep(kind="program", command=("prepare",)), False),
    ],
)
def test_only_steps_that_can_go_on_keep_what_is_half_done(
    step: PipelineStep, goes_on: bool, tmp_path: Path
) -> None:
    order = StepOrder(
        pipeline="x", folder=str(tmp_path), registry="", run="0001", task="a", key="key", step=step
    )
    work = StepWork(order, Workspace(tmp_path), ContentCache(tmp_path / "hashes.json"))
    work.prepare()
    (work.work / "half").touch()
    work.prepare()
    assert (work.work / "half").exists() is goes_on
