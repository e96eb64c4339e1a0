"""What a run starts from: a checkpoint of its own or another run, foreign weights, or nothing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from phalanx.checkpoint import Checkpointer, CheckpointError, Manifest
from phalanx.checkpoint.format.describe import current_rank
from phalanx.checkpoint.format.tier import step_of
from phalanx.config import Job
from phalanx.model.hf import HfError, load_hf
from phalanx.model.post_training.adapters import MARK as ADAPTER_MARK
from phalanx.parallel import Weight
from phalanx.train.optim.schedule import rewritten_rate
from phalanx.train.report.progress import event_text
from phalanx.train.report.records import StartRecord
from phalanx.train.resume.parent import archive_root, left_out, run_of
from phalanx.train.resume.refusal import refuse_model_of, refuse_state_of
from phalanx.train.resume.saving import keepers_home, local_root
from phalanx.train.stages import changed_stages

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer

MEMORY, NODE_DISKS, DISK = "the nodes' memory", "the nodes' own disks", "disk"
ARCHIVE, WEIGHTS = "the archive", "weights"
REASON_CHARACTERS = 500  # of one reason on the screen; the log has it whole

log = logging.getLogger(__name__)


def load_start(
    job: Job, trainer: Trainer, checkpointer: Checkpointer, parents: list[Path | str]
) -> StartRecord:
    """Put the trainer where the run starts from, and say where that is; collective."""
    settings = job.checkpoint
    if settings.load_hf:
        load_foreign_weights(trainer, Path(settings.load_hf))
    manifest, tier = None, ""
    changes: tuple[str, ...] = ()
    if settings.resume == "auto" and not settings.weights_only:
        manifest = load_from_memory(job, trainer, checkpointer, parents)
        tier = MEMORY if "memory" in checkpointer.loaded_from else NODE_DISKS
    if settings.resume and manifest is None and parents:
        # A path that somebody named is loaded or refused; "auto" takes the newest that is whole.
        tensors, weights_only = trainer.tensors(), settings.weights_only
        if weights_only:  # of the model itself: adapters begin afresh
            tensors = {name: each for name, each in tensors.items() if ADAPTER_MARK not in name}
        if settings.resume == "auto":
            manifest = checkpointer.load_newest(parents, tensors, weights_only=weights_only)
        else:
            manifest = checkpointer.load(parents[0], tensors, weights_only=weights_only)
        tier = ARCHIVE if _is_archived(job, checkpointer.loaded_from) else DISK
    if manifest is not None:
        # The launcher asks no archive and no keeper, and the newest may not have been whole.
        refuse_model_of(job, manifest, checkpointer.loaded_from or tier)
    if manifest is not None and settings.weights_only:
        trainer.start_from_weights()
        tier = WEIGHTS
    elif manifest is not None:
        refuse_state_of(job, manifest.config, checkpointer.loaded_from or tier)
        trainer.restore(manifest)
        rewritten = rewritten_rate(job, manifest.config, manifest.step)
        changes = (*([rewritten] if rewritten else []), *changed_stages(job, manifest))
    start = _start(job, trainer, checkpointer, tier if manifest is not None else "")
    if changes:
        start = msgspec.structs.replace(start, changes=changes)
    if settings.resume or start.tier:
        log.warning("%s", event_text(start))
    return start


def _start(job: Job, trainer: Trainer, checkpointer: Checkpointer, tier: str) -> StartRecord:
    foreign = job.checkpoint.load_hf if not tier else ""
    named = tier in (DISK, ARCHIVE, WEIGHTS)
    passed_over = list(checkpointer.passed_over)
    if job.checkpoint.resume == "auto" and tier in ("", DISK, ARCHIVE) and current_rank() == 0:
        known = {each.partition(": ")[0] for each in passed_over}  # found bad just now
        others = left_out(job, checkpointer.loaded_from if tier else "")
        passed_over += [each for each in others if each.partition(": ")[0] not in known]
    return StartRecord(
        job=job.name,
        generation=trainer.generation,
        step=trainer.step,
        tier=WEIGHTS if foreign else tier,
        path=foreign or (checkpointer.loaded_from if named else ""),
        passed_over=tuple(each[:REASON_CHARACTERS] for each in passed_over[:3]),
    )


def _is_archived(job: Job, where: str) -> bool:
    return "://" in where or (
        bool(job.checkpoint.archive.url) and where.startswith(archive_root(job) + "/")
    )


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
        fix = (
            "no checkpoint is on disk to fall back to. What is bad is remembered and not tried "
            "again: start again for whatever else the nodes hold, or from step 0 if that is nothing"
        )
        raise CheckpointError("in the nodes' memory", checkpointer.passed_over, fix)
    if manifest is None:
        checkpointer.release_memory(home)  # where the disk is newer their time is over
    else:
        # Until this run has saved something, theirs may be the only copy: their lease ends it.
        trainer.unsaved = manifest.step > on_disk
        log.warning("continuing at step %d from the nodes' memory or disks", manifest.step)
    return manifest


def load_foreign_weights(trainer: Trainer, folder: Path) -> None:
    """Fill this rank's blocks from a Hugging Face folder, one whole tensor in memory at a time."""
    weights = trainer.engine.weights
    missing = {weight.name: weight for weight in weights if ADAPTER_MARK not in weight.name}
    biases = {
        name: buffer
        for part in trainer.engine.parts
        for name, buffer in part.named_buffers()
        if name.endswith(".expert_bias")
    }
    for name, whole in load_hf(folder, {*missing, *biases}):
        if name in biases:
            biases[name].copy_(whole)
            continue
        weight = missing.pop(name)
        if whole.shape != weight.parameter.shape:
            shapes = f"{tuple(whole.shape)}, the job's model {tuple(weight.parameter.shape)}"
            raise HfError(folder, f"{name} has the shape {shapes}")
        weight.master.copy_(_block(whole, weight))
    if missing:
        raise HfError(folder, f"lacks {len(missing)} tensors, first {next(iter(missing))}")
    trainer.start_from_weights()


def _block(whole: Tensor, weight: Weight) -> Tensor:
    """The part of a whole tensor that this rank holds."""
    parameter = weight.parameter
    if not isinstance(parameter, DTensor):
        return whole
    mesh, placements = parameter.device_mesh, parameter.placements
    sizes, offsets = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    return whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
