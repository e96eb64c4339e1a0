"""The checkpoint that a run continues."""

from __future__ import annotations

import datetime
import logging
from pathlib import Path

from phalanx.checkpoint import CheckpointError, latest, list_checkpoints, read_manifest
from phalanx.checkpoint.format.folder import read_bad, scan
from phalanx.checkpoint.format.manifest import MANIFEST_FILE
from phalanx.checkpoint.format.tier import (
    FolderTier,
    ObjectTier,
    Tier,
    entries,
    open_source,
    open_tier,
    step_of,
)
from phalanx.config import ConfigError, Job

log = logging.getLogger(__name__)


def find_parents(job: Job) -> list[Path | str]:
    """Checkpoints that a run may continue, best first; none for a fresh start.

    The run that saved last comes first, its last step before the others; copies in the archive
    stand behind the originals, and before anything older.
    """
    if "://" in job.checkpoint.resume:
        return [_archived(job.checkpoint.resume)]
    if job.checkpoint.resume != "auto":
        found = find_parent(job)
        return [] if found is None else [found]
    saved = _saved_runs(Path(job.runs) / job.name)
    ranked = [
        (saved[run.parent.name], run.parent.name, step_of(path.name), 1, str(path.absolute()))
        for run in (Path(job.runs) / job.name).glob("*/checkpoints")
        for path in list_checkpoints(run)
        if _readable(path)
    ]
    if job.checkpoint.archive.url:
        for run, where in archived_runs(archive_root(job)):
            copies = {step_of(name): f"{where}/{name}" for name in trusted(open_tier(where))}
            if copies:
                last = saved.get(run) or _copied(copies[max(copies)])
                ranked += [(last, run, step, 0, copies[step]) for step in copies]
    return [where if "://" in where else Path(where) for *_, where in sorted(ranked, reverse=True)]


def archive_root(job: Job) -> str:
    """Where copies of all runs of a name are."""
    return f"{job.checkpoint.archive.url.rstrip('/')}/{job.name}"


def archived_runs(root: str) -> list[tuple[str, str]]:
    """Runs that have copies in an archive, and where; none while it does not answer."""
    if "://" not in root:
        return [(path.name, str(path)) for path in sorted(Path(root).glob("*")) if path.is_dir()]
    try:
        return [(name, f"{root}/{name}") for name in ObjectTier(root).folders()]
    except OSError as error:
        log.error("%s cannot be asked for checkpoints: %s", root, error)
        return []


def trusted(tier: Tier) -> list[str]:
    """Complete checkpoints of a tier that were not found to be bad."""
    try:
        return [entry.name for entry in entries(tier, {}, sized=False) if not entry.bad]
    except OSError as error:
        log.error("%s cannot be asked for checkpoints: %s", tier.where, error)
        return []


def find_parent(job: Job) -> Path | None:
    """The checkpoint on disk that ``checkpoint.resume`` means; None if there is none to mean.

    Asks no object store: the launcher forks after this, which such clients do not survive.
    """
    wanted = job.checkpoint.resume
    if not wanted or "://" in wanted:
        return None
    if wanted == "auto":
        return newest_of_name(Path(job.runs) / job.name)
    parent = checkpoint_at(Path(wanted))
    try:
        manifest = read_manifest(parent)
    except CheckpointError as error:
        newest = newest_of_name(Path(job.runs) / job.name)
        fix = f"the newest of this name is {newest}" if newest else 'set it to "" for a fresh start'
        there = Path(wanted).exists()
        problem = "; ".join(error.problems) if there else "there is no such folder"
        raise ConfigError(
            "checkpoint.resume", wanted, f"no usable checkpoint: {problem}", fix
        ) from None
    if not manifest.mesh and not job.checkpoint.weights_only:
        whence = f", imported from {manifest.origin}" if manifest.origin else ""
        lacks = "step, tokens, data cursor and mesh of a run are not in it"
        rule = f"holds tensors alone{whence}: {lacks}"
        fix = "set checkpoint.weights_only = true to start from its weights at step 0"
        raise ConfigError("checkpoint.resume", wanted, rule, fix)
    return parent.absolute()


def checkpoint_at(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest of a run, of a folder of them, or of
    all runs of a name.
    """
    if found := latest(path / "checkpoints") or latest(path):
        return found
    return path if (path / MANIFEST_FILE).exists() else newest_of_name(path) or path


def _archived(wanted: str) -> str:
    try:
        open_source(wanted)
    except (CheckpointError, OSError) as error:
        problem = "; ".join(error.problems) if isinstance(error, CheckpointError) else str(error)
        rule = f"no usable checkpoint: {problem}"
        raise ConfigError("checkpoint.resume", wanted, rule, "phalanx ckpt ls lists them") from None
    return wanted


def newest_of_name(runs: Path) -> Path | None:
    """The last checkpoint of that run in a folder of runs that saved last."""
    saved = _saved_runs(runs)
    same_name = [
        (saved[run.parent.name], run.parent.name, path)
        for run in runs.glob("*/checkpoints")
        if (path := latest(run)) is not None and _readable(path)
    ]
    return max(same_name)[-1].absolute() if same_name else None


def _saved_runs(runs: Path) -> dict[str, str]:
    """When each run in a folder of runs saved its last step, whoever gave it its name."""
    last = {
        run.parent.name: max(complete).path
        for run in runs.glob("*/checkpoints")
        if (complete := [seen for seen in scan(run) if seen.complete])
    }
    return {name: _saved(path) for name, path in last.items()}


def _saved(path: Path) -> str:
    """When a checkpoint was made, as its manifest says it; of a damaged one, its folder."""
    try:
        return read_manifest(path).created
    except CheckpointError:
        changed = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC)
        return changed.isoformat(timespec="seconds")


def _copied(where: str) -> str:
    """When a checkpoint was made of which an archive has a copy; "": it cannot be read."""
    try:
        return open_source(where).manifest.created
    except (CheckpointError, OSError) as error:
        log.error("%s cannot be read: %s", where, error)
        return ""


def fallback_note(step: int, parents: list[Path | str]) -> dict[str, str]:
    """What to tell where the run continues an older checkpoint than the one that was found."""
    newest = step_of(str(parents[0]).rpartition("/")[2]) if parents else -1
    if step == 0 or step >= newest:  # 0: only the weights were taken
        return {}
    return {f"continued from step {step}": f"{parents[0]} is damaged"}


def left_out(job: Job, chosen: str) -> list[str]:
    """Checkpoints on disk that would have come before ``chosen``, had they not been found bad."""
    run, step = (run_of(chosen), step_of(chosen.rpartition("/")[2])) if chosen else ("", -1)
    saved = _saved_runs(Path(job.runs) / job.name)
    newer = [
        (*key, seen.path.absolute())
        for folder in (Path(job.runs) / job.name).glob("*/checkpoints")
        for seen in scan(folder)
        if seen.complete
        and (key := (saved[folder.parent.name], folder.parent.name, seen.step))
        > (saved.get(run, ""), run, step)
    ]
    wrong = {path: _problems(path) for *_, path in sorted(newer, reverse=True)}
    return [f"{path}: {'; '.join(problems)}" for path, problems in wrong.items() if problems]


def run_of(checkpoint: str) -> str:
    """The run that a checkpoint belongs to, by its path or address."""
    folders = checkpoint.rstrip("/").split("/")[:-1]
    return folders[-2] if folders[-1] == "checkpoints" else folders[-1]


def _readable(path: Path) -> bool:
    """One damaged manifest must not hide an older good checkpoint."""
    return not _manifest_problems(path)


def _problems(path: Path) -> list[str]:
    return read_bad(FolderTier(path.parent), path.name) or _manifest_problems(path)


def _manifest_problems(path: Path) -> list[str]:
    try:
        read_manifest(path)
    except CheckpointError as error:
        return error.problems
    return []
