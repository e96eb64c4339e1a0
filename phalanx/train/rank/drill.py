"""Faults on order, for tests and chaos: a rank that is slow, stands still, or holds a wrong bit.

Nothing of it exists unless the agent was started with PHALANX_CHAOS: then the worker looks into
the folder that this variable names before every step. Files are named by what they do and the
worker's index on its node: ``flip-0``, ``nan-0``, ``deadlock-0``, ``slow-0`` (its content: seconds
a step), ``err-0`` (every update goes wrong, in the same way, while it is there).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from phalanx.train.callback import Callback, TrainingRun

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer

FLIPPED_BIT = 22  # the highest of a float32's fraction: a plausible number, and a wrong one

log = logging.getLogger(__name__)


class Drill(Callback):
    """What was ordered of one worker."""

    def __init__(self, folder: Path, index: int) -> None:
        self._flip, self._nan, self._deadlock, self._slow, self._err = (
            folder / f"{name}-{index}" for name in ("flip", "nan", "deadlock", "slow", "err")
        )

    def before_step(self, run: TrainingRun) -> None:
        """Carry out what lies in the folder."""
        if _taken(self._deadlock):
            log.warning("drill: standing still")
            threading.Event().wait()
        if _taken(self._flip):
            _flip_bit(run.trainer)
        if _taken(self._nan):
            _spoil(run.trainer)
        with suppress(OSError, ValueError):
            time.sleep(float(self._slow.read_text()))

    def before_update(self, run: TrainingRun) -> None:
        """A processor that errs: the sum of the weights was right until this update."""
        if self._err.exists():
            _flip_bit(run.trainer)


def ordered_drill() -> Drill | None:
    """The drill that this process takes part in, if any."""
    folder = os.environ.get("PHALANX_CHAOS", "")
    return Drill(Path(folder), int(os.environ.get("PHALANX_INDEX", "0"))) if folder else None


def _taken(path: Path) -> bool:
    with suppress(OSError):
        path.unlink()
        return True
    return False


def _flip_bit(trainer: Trainer) -> None:
    weight = max(trainer.engine.weights, key=lambda each: each.master.numel())
    weight.master.detach().reshape(-1).view(torch.int32)[0] ^= 1 << FLIPPED_BIT
    weight.publish()
    log.warning("drill: flipped a bit of %s after step %d", weight.name, trainer.step)


def _spoil(trainer: Trainer) -> None:
    weight = max(trainer.engine.weights, key=lambda each: each.master.numel())
    weight.master.detach().fill_(float("nan"))
    weight.publish()
    log.warning("drill: %s is no number after step %d", weight.name, trainer.step)
