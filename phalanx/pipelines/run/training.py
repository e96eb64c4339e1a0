"""A train step: the job trains in the work folder, and its run's folder is the output."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx.pipelines.run.content import last_checkpoint
from phalanx.train.exits import EndReason

RUNS = ".runs"  # in the work folder; hidden, so that no output has its name


class _Exit(Struct, frozen=True):
    """The keys read from a run's ``exit_info.json``."""

    reason: str = ""


def train_overrides(work: Path, settings: dict[str, str]) -> list[str]:
    """Settings added to the job file of a train step, so that it resumes a killed attempt."""
    texts = [f"{key}={text}" for key, text in settings.items()]
    return [*texts, f"runs={work / RUNS}", "checkpoint.resume=auto", "checkpoint.at_end=true"]


def trained(work: Path, output: str) -> bool:
    """Whether an attempt has made all steps; moves the run to the place of the output."""
    if (work / output).exists():
        return True
    folders = sorted((work / RUNS).glob("*/*/"))
    if not any(_reason(folder) == EndReason.DONE for folder in folders):
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
