"""The checkpoint that a run continues."""

from __future__ import annotations

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
    path = Path(wanted)
    found = latest(path / "checkpoints") or latest(path) or path
    try:
        read_manifest(found)
    except CheckpointError as error:
        newest = newest_of_name(Path(job.runs) / job.name)
        fix = f"the newest of this name is {newest}" if newest else 'set it to "" for a fresh start'
        problem = "; ".join(error.problems)
        raise ConfigError(
            "checkpoint.resume", wanted, f"no usable checkpoint: {problem}", fix
        ) from None
    return found.absolute()


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
