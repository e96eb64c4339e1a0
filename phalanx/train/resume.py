"""What a run starts from: a checkpoint of its own or another run, foreign weights, or nothing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from phalanx.checkpoint import Checkpointer, CheckpointError, Manifest
from phalanx.checkpoint.tier import step_of
from phalanx.config import Job
from phalanx.model.hf import HfError, load_hf
from phalanx.parallel import Weight
from phalanx.train.saving import keepers_home, local_root

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer

log = logging.getLogger(__name__)


def load_start(
    job: Job, trainer: Trainer, checkpointer: Checkpointer, parents: list[Path | str]
) -> None:
    """Put the trainer where the run starts from; collective over all ranks."""
    settings = job.checkpoint
    if settings.load_hf:
        load_foreign_weights(trainer, Path(settings.load_hf))
    if not settings.resume:
        return
    manifest = None
    if settings.resume == "auto" and not settings.weights_only:
        manifest = load_from_memory(job, trainer, checkpointer, parents)
    if manifest is None and parents:
        # A path that somebody named is loaded or refused; "auto" takes the newest that is whole.
        tensors, weights_only = trainer.tensors(), settings.weights_only
        if settings.resume == "auto":
            manifest = checkpointer.load_newest(parents, tensors, weights_only=weights_only)
        else:
            manifest = checkpointer.load(parents[0], tensors, weights_only=weights_only)
    if settings.weights_only:
        trainer.publish_weights()
    elif manifest is not None:
        trainer.restore(manifest)


def load_from_memory(
    job: Job, trainer: Trainer, checkpointer: Checkpointer, parents: list[Path | str]
) -> Manifest | None:
    """What a killed run's keepers still hold, if it is not older than the newest on disk."""
    home = keepers_home(job)
    on_disk = step_of(str(parents[0]).rpartition("/")[2]) if parents else -1
    manifest = checkpointer.load_memory(
        home,
        trainer.tensors(),
        newer_than=on_disk - 1,
        local=local_root(job),
        local_run=run_of(str(parents[0])) if parents else "",
    )
    if manifest is None and checkpointer.broke_off and not parents:
        problem = "the nodes' memory could not be read to the end, and no checkpoint is on disk"
        fix = "start again to try once more; checkpoint.resume = '' begins at step 0"
        raise CheckpointError(home, problem, fix)
    if manifest is None:
        checkpointer.release_memory(home)  # where the disk is newer their time is over
    else:
        # Until this run has saved something, theirs may be the only copy: their lease ends it.
        log.warning("continuing at step %d from the nodes' memory or disks", manifest.step)
    return manifest


def run_of(checkpoint: str) -> str:
    """The run that a checkpoint belongs to, by its path or address."""
    folders = checkpoint.rstrip("/").split("/")[:-1]
    return folders[-2] if folders[-1] == "checkpoints" else folders[-1]


def load_foreign_weights(trainer: Trainer, folder: Path) -> None:
    """Fill this rank's blocks from a Hugging Face folder, one whole tensor in memory at a time."""
    missing = {weight.name: weight for weight in trainer.engine.weights}
    for name, whole in load_hf(folder, set(missing)):
        weight = missing.pop(name)
        if whole.shape != weight.parameter.shape:
            shapes = f"{tuple(whole.shape)}, the job's model {tuple(weight.parameter.shape)}"
            raise HfError(folder, f"{name} has the shape {shapes}")
        weight.master.copy_(_block(whole, weight))
    if missing:
        raise HfError(folder, f"lacks {len(missing)} tensors, first {next(iter(missing))}")
    trainer.publish_weights()


def _block(whole: Tensor, weight: Weight) -> Tensor:
    """The part of a whole tensor that this rank holds."""
    parameter = weight.parameter
    if not isinstance(parameter, DTensor):
        return whole
    mesh, placements = parameter.device_mesh, parameter.placements
    sizes, offsets = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    return whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
