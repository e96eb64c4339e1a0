"""The key of a task: a hash of everything that its result depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from phalanx.cluster.pipelines.graph import Task

FORMAT = 1
RUNS_PHALANX = ("data", "train", "eval", "export", "register")


def task_key(task: Task, contents: Mapping[str, Sequence[str]], version: str) -> str:
    """Hash of the command and of the inputs' contents by name; independent of paths."""
    step = task.step
    parts = {
        "format": FORMAT,
        "task": task.name,
        "kind": step.kind,
        "phalanx": version if step.kind in RUNS_PHALANX else "",
        "command": step.command,
        "settings": step.settings,
        "environment": step.environment,
        "outputs": step.outputs,
        "scores": step.scores,
        "model": step.model,
        "question": step.question,
        "inputs": {name: list(hashes) for name, hashes in contents.items()},
    }
    encoded = msgspec.json.encode(parts, order="sorted")
    return hashlib.sha256(encoded).hexdigest()[:32]
