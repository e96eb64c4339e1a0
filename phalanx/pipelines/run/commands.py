"""The command line of a step's process."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from phalanx.cluster.pipelines.description import PipelineStep
from phalanx.cluster.pipelines.templates import fill_paths
from phalanx.pipelines.run.training import train_overrides

PHALANX = (sys.executable, "-m", "phalanx")
SAME = {"phalanx": PHALANX, "python": (sys.executable,)}  # as the one that runs the pipeline


class StepCommand(Struct, frozen=True):
    """What a step runs."""

    argv: list[str]
    environment: dict[str, str]
    overrides: list[str] = []  # of a train step: settings over those of its job file


def step_command(
    step: PipelineStep, inputs: Mapping[str, Sequence[str]], work: Path
) -> StepCommand:
    """Arguments and environment variables of a step, with paths filled in."""
    paths = step_paths(step, inputs, work)
    argv = fill_paths(step.command, paths)
    environment = {
        name: fill_paths([text + " "], paths)[0][:-1] for name, text in step.environment.items()
    }
    match step.kind:
        case "train":
            overrides = train_overrides(work, train_settings(step, paths))
            flags = [word for text in overrides for word in ("--set", text)]
            return StepCommand([*PHALANX, "train", step.job, *flags], environment, overrides)
        case "export":
            (output,) = (work / text for text in step.outputs.values())
            (checkpoint,) = inputs["checkpoint"]
            where = [checkpoint, str(output)]
            return StepCommand([*PHALANX, "convert", "export-hf", *where, *argv], environment)
        case "data" | "eval" as group:
            return StepCommand([*PHALANX, group, *argv], environment)
    return StepCommand([*SAME.get(argv[0], argv[:1]), *argv[1:]], environment)


def step_paths(
    step: PipelineStep, inputs: Mapping[str, Sequence[str]], work: Path
) -> dict[str, Sequence[str]]:
    """What ``inputs.NAME`` and ``outputs.NAME`` stand for."""
    made = {f"outputs.{name}": [str(work / text)] for name, text in step.outputs.items()}
    return {**{f"inputs.{name}": paths for name, paths in inputs.items()}, **made}


def train_settings(step: PipelineStep, paths: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Settings of a train step as KEY=VALUE strings."""
    texts = {}
    for key, value in step.settings.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        texts[key] = fill_paths([text + " "], paths)[0][:-1]
    return texts
