"""What a run starts from: a checkpoint of its own or another run, foreign weights, or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from phalanx.checkpoint import Checkpointer, CheckpointError, latest, read_manifest
from phalanx.config import ConfigError, Job
from phalanx.model.hf import HfError, load_hf
from phalanx.parallel import Weight

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer


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
        fix = f"the newest of this name is {newest}" if newest else 'or "" for a fresh start'
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


def load_start(job: Job, trainer: Trainer, checkpointer: Checkpointer, parent: Path | None) -> None:
    """Put the trainer where the run starts from; collective over all ranks."""
    if parent is not None:
        # A path that somebody named is loaded or refused; "auto" takes the newest that is whole.
        load = checkpointer.load_newest if job.checkpoint.resume == "auto" else checkpointer.load
        weights_only = job.checkpoint.weights_only
        manifest = load(parent, trainer.tensors(), weights_only=weights_only)
        if weights_only:
            trainer.publish_weights()
        else:
            trainer.restore(manifest)
    elif job.checkpoint.load_hf:
        load_foreign_weights(trainer, Path(job.checkpoint.load_hf))


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
