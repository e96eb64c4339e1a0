"""A train step: the job's run goes into the work folder, and its folder is the output."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx.pipelines.graph import Task
from phalanx.pipelines.run.content import last_checkpoint

RUNS = ".runs"  # in the work folder; hidden, so that no output has its name
ALL_STEPS_DONE = "done"


class _Exit(Struct, frozen=True):
    """What is read of a run's ``exit_info.json``."""

    reason: str = ""


def train_overrides(task: Task, work: Path, settings: dict[str, str]) -> list[str]:
    """Settings that a train step adds to its job file; an attempt goes on where one was killed."""
    texts = [f"{key}={text}" for key, text in settings.items()]
    return [*texts, f"runs={work / RUNS}", "checkpoint.resume=auto", "checkpoint.at_end=true"]


def trained(work: Path, output: str) -> bool:
    """Whether an attempt has made all steps; moves the run to the place of the output."""
    if (work / output).exists():
        return True
    folders = sorted((work / RUNS).glob("*/*/"))
    if not any(_reason(folder) == ALL_STEPS_DONE for folder in folders):
        return False
    newest = [(last.name, run) for run in folders if (last := last_checkpoint(run)) is not None]
    if not newest:
        return False
    (work / output).parent.mkdir(parents=True, exist_ok=True)
    max(newest)[1].rename(work / output)
    return True


def _reason(run: Path) -> str:
    try:
        return msgspec.json.decode((run / "exit_info.json").read_bytes(), type=_Exit).reason
    except (OSError, msgspec.MsgspecError):
        return ""
