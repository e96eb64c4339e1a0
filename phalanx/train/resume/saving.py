"""How a job's checkpoint settings become a checkpointer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.checkpoint import Checkpointer
from phalanx.checkpoint.keeper.start import home_of
from phalanx.checkpoint.retention import RetentionPolicy
from phalanx.checkpoint.write.commit import ArchiveTier, LocalDisk
from phalanx.config import Job
from phalanx.train.report.run_folder import RunFolder
from phalanx.train.resume.parent import archive_root

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer

PROMPT_BUFFERS = 4  # two newest snapshots, one being filled, one being written to disk


def open_checkpointer(job: Job, folder: RunFolder, *, exclusive: bool = True) -> Checkpointer:
    """The checkpointer of a run's folder; not ``exclusive`` where an agent fences off others."""
    settings = job.checkpoint
    return Checkpointer(
        folder.checkpoints,
        policy=RetentionPolicy(
            last=settings.keep,
            every=settings.keep_every,
            best=settings.keep_best,
            quota_bytes=int(settings.quota_gb * 1e9),
        ),
        archive=archive_of(job, folder.id),
        local=local_of(job, folder.id),
        bytes_per_second=settings.write_limit * 1e9,
        stagger_seconds=settings.stagger_seconds,
        exclusive=exclusive,
    )


def archive_of(job: Job, run_id: str) -> ArchiveTier | None:
    """Where a run's checkpoints are copied to."""
    settings = job.checkpoint.archive
    if not settings.url:
        return None
    return ArchiveTier(
        url=f"{archive_root(job)}/{run_id}",
        root=settings.url,
        policy=RetentionPolicy(
            last=settings.keep,
            every=settings.keep_every,
            best=settings.keep_best,
            quota_bytes=int(settings.quota_gb * 1e9),
        ),
        retry_seconds=settings.retry_seconds,
    )


def local_of(job: Job, run_id: str) -> LocalDisk | None:
    """Where a run's shards are written to on every node's own disk."""
    settings, root = job.checkpoint.local, local_root(job)
    if root is None:
        return None
    return LocalDisk(
        root=str(root),
        run=run_id,
        policy=RetentionPolicy(
            # Another node may be as many saves behind as there are buffers.
            last=max(settings.keep, job.checkpoint.buffers + 1),
            every=settings.keep_every,
            best=settings.keep_best,
            quota_bytes=int(settings.quota_gb * 1e9),
        ),
    )


def local_root(job: Job) -> Path | None:
    """What all runs of this name have on a node's own disk."""
    path = os.path.expandvars(job.checkpoint.local.path)
    return Path(path).expanduser().absolute() / job.name if path else None


def keepers_home(job: Job) -> Path:
    """Where the keepers of this job's runs are found on a node."""
    return home_of(str(Path(job.runs).absolute() / job.name))


def prepare_saves(job: Job, trainer: Trainer, checkpointer: Checkpointer) -> None:
    """Set up the keeper for periodic saves; collective. One save at the end needs no memory."""
    settings = job.checkpoint
    if settings.mode == "sync" or checkpointer.in_background:
        return
    checkpointer.prepare_background(
        trainer.tensors(),
        generation=trainer.generation,
        step=trainer.step,
        device=trainer.device,
        buffers=settings.buffers,
        lease_seconds=settings.keeper_lease,
        home=keepers_home(job),
        replicate=settings.replicas > 0,
        overlap=True,
    )


def seal(
    job: Job, trainer: Trainer, checkpointer: Checkpointer, buddy_shift: int, spare: str
) -> None:
    """Have every step's snapshot kept, here and at a buddy; the present one is when this returns.

    ``spare``: the buddy's keeper (host:port) where that is no node of the gang. Collective.
    """
    settings = job.checkpoint
    if not checkpointer.prepare_background(
        trainer.tensors(),
        generation=trainer.generation,
        step=trainer.step,
        device=trainer.device,
        buffers=PROMPT_BUFFERS,
        lease_seconds=settings.keeper_lease,
        home=keepers_home(job),
        replicate=buddy_shift > 0 or bool(spare),
        buddy_shift=buddy_shift,
        spare=spare,
        prompt=True,
        overlap=True,
    ):
        return
    checkpointer.save(trainer.step, trainer.tensors(), trainer.extra(), write=False)
    checkpointer.wait_acknowledged()
