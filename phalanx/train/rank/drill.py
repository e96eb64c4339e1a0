"""Faults on order, for tests and chaos: a rank that is slow, stands still, or holds a wrong bit.

Nothing of it exists unless the agent was started with PHALANX_CHAOS: then the worker looks into
the folder that this variable names before every step. Files are named by what they do and the
worker's index on its node: ``flip-0``, ``nan-0``, ``deadlock-0``, ``slow-0`` (its content: seconds
a step), ``err-0`` (every update goes wrong, in the same way, while it is there), ``backward-0``
(likewise every backward).
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
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from phalanx.parallel.gradient_sums import BITS
from phalanx.train.callback import Callback, TrainingRun

if TYPE_CHECKING:
    from phalanx.train.trainer import StepOutcome, Trainer

FLIPPED_BIT = 22  # the highest of a float32's fraction: a plausible number, and a wrong one

log = logging.getLogger(__name__)


class Drill(Callback):
    """What was ordered of one worker."""

    def __init__(self, folder: Path, index: int) -> None:
        names = ("flip", "nan", "deadlock", "slow", "err", "backward")
        self._flip, self._nan, self._deadlock, self._slow, self._err, self._backward = (
            folder / f"{name}-{index}" for name in names
        )
        self._hook: RemovableHandle | None = None  # on a backward that errs

    def before_step(self, run: TrainingRun) -> None:
        """Carry out what lies in the folder."""
        if _taken(self._deadlock):
            log.warning("drill: standing still")
            threading.Event().wait()
        if _taken(self._flip):
            _flip_bit(run.trainer)
        if _taken(self._nan):
            _spoil(run.trainer)
        if self._backward.exists():
            lowest = next(iter(run.trainer.engine.parts[0].layers.values()))
            self._hook = lowest.register_forward_hook(_err_in_backward)
        with suppress(OSError, ValueError):
            time.sleep(float(self._slow.read_text()))

    def before_update(self, run: TrainingRun) -> None:
        """A processor that errs: the sum of the weights was right until this update."""
        if self._err.exists():
            _flip_bit(run.trainer)

    def after_step(self, run: TrainingRun, outcome: StepOutcome) -> None:
        """Whether the next backward errs is looked up again."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


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


def _err_in_backward(block: nn.Module, arguments: object, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(_with_flipped_bit)


def _with_flipped_bit(gradient: Tensor) -> Tensor:
    wrong = gradient.clone()
    bits = wrong.view(-1).view(BITS[wrong.element_size()])
    bits[0] ^= 1 << (FLIPPED_BIT - 8 * (4 - wrong.element_size()))
    return wrong


def _spoil(trainer: Trainer) -> None:
    weight = max(trainer.engine.weights, key=lambda each: each.master.numel())
    weight.master.detach().fill_(float("nan"))
    weight.publish()
    log.warning("drill: %s is no number after step %d", weight.name, trainer.step)
