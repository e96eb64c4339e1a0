"""Replicas compare fingerprints of their weights: numbers that went wrong in silence are found.

Ranks that hold the same block of weights must hold the same bits. Every few steps each adds up
its bits (any single flipped one changes the sum), and one small reduction shows everybody all
sums. Who is wrong is for others to decide: a step that replicas disagree on is never handed over.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from phalanx.parallel import Weight
    from phalanx.train.trainer import Trainer

LEAST_CUDA_EVERY = 10  # reading the sums waits for the device
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

Copies = tuple[tuple[int, int], ...]  # (rank, fingerprint) of every replica of a block


class Diverged(Exception):  # noqa: N818 - it is a finding, told to whoever decides
    """Replicas disagree. ``changed``: ranks whose weights changed between two updates.

    ``again``: what the step gave when it was made a second time.
    """

    def __init__(
        self,
        step: int,
        clean_step: int,
        copies: Copies,
        changed: tuple[int, ...] = (),
        again: int | None = None,
    ) -> None:
        super().__init__(f"replicas disagree at step {step}; they agreed at step {clean_step}")
        self.step, self.clean_step, self.copies = step, clean_step, copies
        self.changed, self.again = changed, again


class Fingerprints:
    """The comparisons of one generation.

    ``disputed`` outlives it: steps that no majority decided on, with what each rank had.
    """

    def __init__(self, trainer: Trainer, every: int, disputed: dict[int, Copies]) -> None:
        mesh = trainer.mesh
        self._group = mesh.stage_group if mesh.uses_ddp else mesh.group("replicate")
        self._blocks = _bits([w for w in trainer.engine.weights if w.copies > 1])
        self._every = every if mesh.device.type == "cpu" else max(every, LEAST_CUDA_EVERY)
        self._device, self._clean, self._disputed = mesh.device, trainer.step, disputed
        self._before = torch.zeros((), dtype=torch.int64, device=mesh.device)
        self._agreed: int | None = None  # the sum after the last step

    @property
    def active(self) -> bool:
        """Whether there is anything to compare."""
        return self._group is not None and bool(self._blocks) and self._every > 0

    def before_update(self) -> None:
        """A step is about to be applied: what changed until now was not changed by an update."""
        if self.active and self._every == 1:
            self._before = self._sum()

    def _sum(self) -> Tensor:
        return torch.stack([block.sum(dtype=torch.int64) for block in self._blocks]).sum()

    def compare(self, step: int) -> None:
        """After a step's update: raises ``Diverged`` on all replicas alike. Collective."""
        if not self.active or step % self._every:
            return
        assert self._group is not None
        ranks = dist.get_process_group_ranks(self._group)
        disputed = self._disputed.pop(step, None)
        sums = torch.zeros(3, len(ranks), dtype=torch.int64, device=self._device)
        own = dist.get_rank(self._group)
        sums[0, own], sums[1, own] = self._sum(), self._before
        sums[2, own] = zlib.crc32(repr(disputed).encode())
        dist.all_reduce(sums, group=self._group)
        found, before, known = sums.tolist()
        if len(set(known)) > 1:  # somebody new took the place of one of them
            disputed = None
        if len(set(found)) > 1:
            copies = tuple(zip(ranks, found, strict=True))
            told = self._agreed is not None and self._every == 1
            changed = [r for r, each in zip(ranks, before, strict=True) if each != self._agreed]
            if not (told and changed) and 2 * max(map(found.count, found)) <= len(found):
                self._disputed[step] = copies  # no majority: made again, the step itself decides
            raise Diverged(step, self._clean, copies, tuple(changed) if told else ())
        if disputed is not None and found[0] in [fingerprint for _, fingerprint in disputed]:
            raise Diverged(step, self._clean, disputed, again=found[0])
        self._clean, self._agreed = step, found[0]


def _bits(weights: list[Weight]) -> list[Tensor]:
    """The memory of weights as integers: masters, and what computes where that is apart."""
    found = []
    for weight in weights:
        found.append(weight.master)
        if weight.master.data_ptr() != weight.local.data_ptr():
            found.append(weight.local)
    return [block.detach().reshape(-1).view(BITS[block.element_size()]) for block in found]
