"""Loading what a rank was told to restore: a start, keepers' memory, or a durable checkpoint."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from phalanx.checkpoint import Checkpointer, Manifest, list_checkpoints
from phalanx.train.report import run_folder
from phalanx.train.report.run_folder import RunFolder
from phalanx.train.resume.saving import keepers_home, local_root

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer

log = logging.getLogger(__name__)
STEPS_TOLD = 256  # checkpoints that are named when one could not be restored


class RestorePoint(NamedTuple):
    """What to continue from."""

    step: int
    source: Literal["none", "peer", "disk", "remote"]
    skipped: tuple[tuple[int, int], ...] = ()  # samples [first, past) that were left out before
    skip_step: int = 0  # the batch of this step is left out too; 0: none
    told: tuple[int, int] = (0, 0)  # at this step, replicas of this block tell what they have
    saves: bool = False  # then write it and leave, without a step
    parents: tuple[Path | str, ...] | None = None  # of "none", best first; None: to be looked for


def enter_folder(folder: RunFolder, point: RestorePoint, trainer: Trainer) -> None:
    """The run's folder is made by whoever begins; later it is there, or its storage is away.

    Looked at before anything is loaded: an empty folder in its place would be taken for a run
    without checkpoints, and all of it made again.
    """
    if point.step and not folder.path.is_dir():
        words = "the folder of the run was there, and is away"
        raise FileNotFoundError(errno.ENOENT, words, str(folder.path))
    if trainer.mesh.rank == 0:
        run_folder.make(trainer.job, folder)


def load_snapshot(
    folder: RunFolder, point: RestorePoint, trainer: Trainer, checkpointer: Checkpointer
) -> str:
    """Load a step that an earlier generation made; returns why it cannot be had. Collective."""
    manifest: Manifest | None
    if point.source == "peer":
        home = keepers_home(trainer.job)
        manifest = checkpointer.load_memory(home, trainer.tensors(), step=point.step)
    else:
        manifest = _load_durable(folder, point.step, trainer, checkpointer)
    if manifest is None:
        return "; ".join([f"step {point.step} is nowhere whole", *checkpointer.passed_over])
    trainer.restore(manifest)
    trainer.unsaved = point.source == "peer"
    return ""


def durable_steps(folder: RunFolder, most: int) -> tuple[int, ...]:
    """The newest checkpoints up to a step, so that none is ordered that retention removed."""
    steps = sorted(_step(path) for path in list_checkpoints(folder.checkpoints))
    return tuple(step for step in steps if step <= most)[-STEPS_TOLD:]


def _load_durable(
    folder: RunFolder, step: int, trainer: Trainer, checkpointer: Checkpointer
) -> Manifest | None:
    """From the nodes' own disks where they have this step, else from the shared folder."""
    if (disks := local_root(trainer.job)) is not None:
        manifest = checkpointer.load_memory(
            keepers_home(trainer.job),
            trainer.tensors(),
            step=step,
            local=disks,
            local_run=folder.id,
        )
        if manifest is not None:
            log.warning("step %d comes from the nodes' own disks", step)
            return manifest
    found = [path for path in list_checkpoints(folder.checkpoints) if _step(path) == step]
    path = checkpointer.agreed(found[-1] if found else None)
    return None if path is None else checkpointer.load(path, trainer.tensors())


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-").partition(".")[0])
