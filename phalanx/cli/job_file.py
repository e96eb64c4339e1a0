"""Job files as commands read them: overrides, another name, the number of ranks."""

from __future__ import annotations

from pathlib import Path

import msgspec

from phalanx.config import ConfigError, Job, check, default_world_size, load_job, resolve
from phalanx.config.rules.text import name_problems
from phalanx.hardware import count_cuda


def load(path: Path, overrides: list[str] | None, world_size: int | None) -> tuple[Job, int]:
    """The job in a file and the number of ranks to start."""
    job = load_job(path, overrides or [])
    return job, world_size or default_world_size(job, count_cuda())


def refuse_name(name: str) -> None:
    """A name given in place of the job's obeys the same rules."""
    if name and (wrong := list(name_problems("--name", name))):
        raise ConfigError.of(wrong)


def load_named(
    path: Path, overrides: list[str] | None, world_size: int | None, name: str
) -> tuple[Job, int]:
    """The same, checked and resolved, and called ``name`` where one is given."""
    refuse_name(name)
    job, ranks = load(path, overrides, world_size)
    job = msgspec.structs.replace(job, name=name or job.name)
    check(job, ranks)
    return resolve(job, ranks), ranks


def missing_corpora(job: Job | None, folder: str) -> list[str]:
    """Corpora of a job that are not on this machine, a line each: its nodes may have them."""
    if job is None:
        return []
    data = job.data
    sources = {f"data.blend.{name}.path": each.path for name, each in data.blend.items()}
    return [
        f"{key} = {path}: is not on this machine (from {folder}); unless the nodes have it the job "
        "ends before its first step: make it with `phalanx data tokenize`, or correct the path"
        for key, path in ({"data.path": data.path} | sources).items()
        if path and "://" not in path and not Path(folder, path).exists()
    ]
