"""Replicas compare fingerprints of their weights: numbers that went wrong in silence are found.

Ranks that hold the same block of weights must hold the same bits. Every few steps each adds up
its bits (any single flipped one changes the sum), and one small reduction shows everybody all
sums. Who is wrong is for others to decide: a step that replicas disagree on is never handed over.
Where they cannot tell either, the step is made again, and those who make it tell what they get.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.gradient_sums import BITS
from phalanx.train.callback import Callback, TrainingRun

if TYPE_CHECKING:
    from phalanx.parallel import Weight
    from phalanx.train.trainer import StepOutcome, Trainer

LEAST_CUDA_EVERY = 10  # reading the sums waits for the device

Copies = tuple[tuple[int, int], ...]  # (rank, fingerprint) of every replica of a block


class ReplicaDivergence(Exception):  # noqa: N818 - it is a finding, told to whoever decides
    """Replicas disagree, or were asked what they came to: ``copies``.

    ``changed``: ranks known to be wrong: their weights changed between two updates, or a majority
    came to other gradients.
    """

    subject = "replicas"

    def __init__(
        self,
        step: int,
        clean_step: int,
        copies: Copies,
        changed: tuple[int, ...] = (),
    ) -> None:
        alike = len({said for _, said in copies}) == 1
        found = "agree this time" if alike else "disagree"
        super().__init__(f"{self.subject} {found} at step {step}; they agreed at step {clean_step}")
        self.step, self.clean_step, self.copies, self.changed = step, clean_step, copies, changed


class Fingerprints(Callback):
    """The comparisons of one generation.

    ``told``: a step that replicas of a block (by their lowest rank) disagreed on before: what they
    have this time is told, though they agree.
    """

    def __init__(self, trainer: Trainer, every: int, start: tuple[int, int] = (0, 0)) -> None:
        mesh = trainer.mesh
        self._group = mesh.stage_group if mesh.uses_ddp else mesh.group("replicate")
        self._blocks = _bits([w for w in trainer.engine.weights if w.copies > 1])
        self._every = every if mesh.device.type == "cpu" else max(every, LEAST_CUDA_EVERY)
        self._device, self._clean, self._told = mesh.device, trainer.step, start
        self._before = torch.zeros((), dtype=torch.int64, device=mesh.device)
        self._agreed: int | None = None  # the sum after the last step

    @property
    def active(self) -> bool:
        """Whether there is anything to compare."""
        return self._group is not None and bool(self._blocks) and self._every > 0

    def before_update(self, run: TrainingRun) -> None:
        self.note_sum()

    def after_step(self, run: TrainingRun, outcome: StepOutcome) -> None:
        self.compare(run.step)

    def note_sum(self) -> None:
        """A step is about to be applied: what changed until now was not changed by an update."""
        if self.active and self._every == 1:
            self._before = self._sum()

    def _sum(self) -> Tensor:
        return torch.stack([block.sum(dtype=torch.int64) for block in self._blocks]).sum()

    def compare(self, step: int) -> None:
        """After a step's update: raises ``ReplicaDivergence`` on all replicas alike. Collective."""
        if not self.active or step % self._every:
            return
        assert self._group is not None
        ranks = dist.get_process_group_ranks(self._group)
        sums = torch.zeros(2, len(ranks), dtype=torch.int64, device=self._device)
        own = dist.get_rank(self._group)
        sums[0, own], sums[1, own] = self._sum(), self._before
        dist.all_reduce(sums, group=self._group)
        sums_now, before = sums.tolist()
        copies = tuple(zip(ranks, sums_now, strict=True))
        if len(set(sums_now)) > 1:
            told = self._agreed is not None and self._every == 1
            changed = [r for r, each in zip(ranks, before, strict=True) if each != self._agreed]
            raise ReplicaDivergence(step, self._clean, copies, tuple(changed) if told else ())
        if (step, min(ranks)) == self._told:
            raise ReplicaDivergence(step, self._clean, copies)
        self._clean, self._agreed = step, sums_now[0]


def _bits(weights: list[Weight]) -> list[Tensor]:
    """The memory of weights as integers: masters, and what computes where that is apart."""
    bits = []
    for weight in weights:
        bits.append(weight.master)
        if weight.master.data_ptr() != weight.local.data_ptr():
            bits.append(weight.local)
    return [block.detach().reshape(-1).view(BITS[block.element_size()]) for block in bits]
