"""The words that start a step's process."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from phalanx.pipelines.graph import Task
from phalanx.pipelines.run.training import train_overrides
from phalanx.pipelines.templates import fill_paths

PHALANX = (sys.executable, "-m", "phalanx")
SAME = {"phalanx": PHALANX, "python": (sys.executable,)}  # as the one that runs the pipeline


class StepCommand(Struct, frozen=True):
    """What a step runs."""

    argv: list[str]
    environment: dict[str, str]
    overrides: list[str] = []  # of a train step: settings over those of its job file


def step_command(task: Task, inputs: Mapping[str, Sequence[str]], work: Path) -> StepCommand:
    """Words and variables of a step, with paths filled in."""
    paths = step_paths(task, inputs, work)
    words = fill_paths(task.step.command, paths)
    environment = {
        name: fill_paths([text + " "], paths)[0][:-1]
        for name, text in task.step.environment.items()
    }
    match task.step.kind:
        case "train":
            overrides = train_overrides(task, work, train_settings(task, paths))
            flags = [word for text in overrides for word in ("--set", text)]
            return StepCommand([*PHALANX, "train", task.step.job, *flags], environment, overrides)
        case "export":
            (output,) = (work / text for text in task.step.outputs.values())
            (checkpoint,) = inputs["checkpoint"]
            where = [checkpoint, str(output)]
            return StepCommand([*PHALANX, "convert", "export-hf", *where, *words], environment)
        case "data" | "eval" as group:
            return StepCommand([*PHALANX, group, *words], environment)
    return StepCommand([*SAME.get(words[0], words[:1]), *words[1:]], environment)


def step_paths(
    task: Task, inputs: Mapping[str, Sequence[str]], work: Path
) -> dict[str, Sequence[str]]:
    """What ``inputs.NAME`` and ``outputs.NAME`` stand for."""
    made = {f"outputs.{name}": [str(work / text)] for name, text in task.step.outputs.items()}
    return {**{f"inputs.{name}": paths for name, paths in inputs.items()}, **made}


def train_settings(task: Task, paths: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Settings of a train step as texts."""
    texts = {}
    for key, value in task.step.settings.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        texts[key] = fill_paths([text + " "], paths)[0][:-1]
    return texts
