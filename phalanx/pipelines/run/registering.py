"""A register step: a checkpoint becomes a version of a model, with its scores and lineage."""

from __future__ import annotations

from pathlib import Path

from phalanx.pipelines.graph import Task
from phalanx.pipelines.machine import PipelineMachine
from phalanx.pipelines.registry.models import (
    ModelLineage,
    ModelRegistry,
    ModelVersion,
)
from phalanx.pipelines.registry.promote import who
from phalanx.pipelines.rules import SCORES
from phalanx.pipelines.run.scores_file import read_scores
from phalanx.train.exits import now

CHECKPOINT, EXPORT = "checkpoint", "export"  # inputs of a register step


def register_task(
    registry: ModelRegistry, task: Task, machine: PipelineMachine, folder: Path, manifest: Path
) -> ModelVersion:
    """Register what a task reads."""
    inputs = {name: outputs[0] for name, outputs in machine.inputs(task).items()}

    def path(name: str) -> str:
        return str(folder / inputs[name].path) if name in inputs else ""

    scores: dict[str, float] = {}
    if SCORES in inputs:
        scores = read_scores(Path(path(SCORES)))
    return registry.register(
        ModelVersion(
            name=task.step.model,
            version=0,
            checkpoint=path(CHECKPOINT),
            content=inputs[CHECKPOINT].content,
            export=path(EXPORT),
            scores=scores,
            lineage=ModelLineage(
                pipeline=machine.pipeline.name,
                manifest=str(manifest),
                inputs={name: each.content for name, each in inputs.items()},
            ),
            registered=now(),
            who=who(),
        )
    )
