"""How a job's checkpoint settings become a checkpointer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.checkpoint import Checkpointer
from phalanx.checkpoint.keepers import home_of
from phalanx.config import Job
from phalanx.train.run_folder import RunFolder

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer


def open_checkpointer(job: Job, folder: RunFolder) -> Checkpointer:
    """The checkpointer of a run's folder."""
    settings = job.checkpoint
    return Checkpointer(folder.checkpoints, settings.keep, settings.write_limit * 1e9)


def keepers_home(job: Job) -> Path:
    """Where the keepers of this job's runs are found on a node."""
    return home_of(str(Path(job.runs).absolute() / job.name))


def prepare_saves(job: Job, trainer: Trainer, checkpointer: Checkpointer) -> None:
    """Set up the keeper for periodic saves; collective. One save at the end needs no memory."""
    settings = job.checkpoint
    if settings.mode == "sync" or settings.every == 0:
        return
    if checkpointer.prepare_background(
        trainer.tensors(),
        generation=trainer.generation,
        step=trainer.step,
        device=trainer.device,
        slots=settings.buffers,
        lease_seconds=settings.keeper_lease,
        home=keepers_home(job),
        replicate=settings.replicas > 0,
    ):
        trainer.before_update = checkpointer.before_update
