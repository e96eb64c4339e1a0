"""The checkpoint that a run continues."""

from __future__ import annotations

import re
from pathlib import Path

from phalanx.checkpoint import CheckpointError, latest, read_manifest
from phalanx.config import ConfigError, Job


def find_parent(job: Job) -> Path | None:
    """The checkpoint that ``checkpoint.resume`` means; None for a fresh start."""
    wanted = job.checkpoint.resume
    if not wanted:
        return None
    if wanted == "auto":
        return newest_of_name(Path(job.runs) / job.name)
    found = checkpoint_at(Path(wanted))
    try:
        manifest = read_manifest(found)
    except CheckpointError as error:
        newest = newest_of_name(Path(job.runs) / job.name)
        fix = f"the newest of this name is {newest}" if newest else 'set it to "" for a fresh start'
        problem = "; ".join(error.problems)
        raise ConfigError(
            "checkpoint.resume", wanted, f"no usable checkpoint: {problem}", fix
        ) from None
    if not manifest.mesh and not job.checkpoint.weights_only:
        rule = "holds weights alone, as `phalanx convert import-hf` makes them"
        raise ConfigError("checkpoint.resume", wanted, rule, "set checkpoint.weights_only = true")
    return found.absolute()


def checkpoint_at(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest of a run or of a folder of them."""
    return latest(path / "checkpoints") or latest(path) or path


def newest_of_name(runs: Path) -> Path | None:
    """The checkpoint written last by any run in a folder of runs."""
    found = []
    for run in sorted(runs.glob("*/checkpoints")):
        path = latest(run)
        if path is None:
            continue
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue  # one bad checkpoint must not hide an older good one
        found.append((manifest.created, manifest.step, str(path)))
    return Path(max(found)[2]).absolute() if found else None


def fallback_note(step: int, parent: Path | None) -> dict[str, str]:
    """What to tell where the run continues an older checkpoint than the one that was found."""
    if parent is None or not (number := re.search(r"(\d+)$", parent.name)):
        return {}
    if step in (0, int(number[1])):  # 0: only the weights were taken
        return {}
    return {f"continued from step {step}": f"{parent} is damaged"}
