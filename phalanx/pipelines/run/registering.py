"""A register step: a checkpoint becomes a version of a model, with its scores and lineage."""

from __future__ import annotations

from pathlib import Path

from phalanx.cluster.pipelines.rules import SCORES
from phalanx.cluster.pipelines.step_order import StepOrder
from phalanx.pipelines.registry.models import (
    ModelLineage,
    ModelRegistry,
    ModelVersion,
)
from phalanx.pipelines.registry.promote import who
from phalanx.pipelines.run.scores_file import read_scores
from phalanx.train.exits import now

CHECKPOINT, EXPORT = "checkpoint", "export"  # inputs of a register step


def register_step(registry: ModelRegistry, order: StepOrder, manifest: Path) -> ModelVersion:
    """Register the checkpoint that a step reads."""
    inputs = {name: sources[0] for name, sources in order.inputs.items()}

    def path(name: str) -> str:
        return str(Path(order.folder) / inputs[name].path) if name in inputs else ""

    scores: dict[str, float] = {}
    if SCORES in inputs:
        scores = read_scores(Path(path(SCORES)))
    return registry.register(
        ModelVersion(
            name=order.step.model,
            version=0,
            checkpoint=path(CHECKPOINT),
            content=inputs[CHECKPOINT].content,
            export=path(EXPORT),
            scores=scores,
            lineage=ModelLineage(
                pipeline=order.pipeline,
                manifest=str(manifest),
                inputs={name: each.content for name, each in inputs.items()},
            ),
            registered=now(),
            who=who(),
        )
    )
