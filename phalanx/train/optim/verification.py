"""Ranks recompute each other's gradients: wrong numbers are found where nothing is replicated.

Every few steps the turn comes to one micro-batch of one rank. All ranks compute it before the
step, from the same tokens and the same weights, and throw the gradients away; then that rank
computes it in the course of its step. Whoever's gradients add up to something else is wrong, and
is named before they reach the weights.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.train.callback import Callback, TrainingRun
from phalanx.train.optim.fingerprint import Copies, ReplicaDivergence

if TYPE_CHECKING:
    from phalanx.data import Batch
    from phalanx.train.trainer import Trainer

IS_VERIFYING = "gradients are computed again"
NOT_DETERMINISTIC = (
    "ranks come to different gradients of the same micro-batch at step %d, and no majority agrees: "
    "they do not compute deterministically, so that nothing can be verified any more: %s"
)

log = logging.getLogger(__name__)


class GradientDivergence(ReplicaDivergence):
    """Ranks that computed the same gradient disagree, or were asked what they came to."""

    subject = "recomputed gradients"


class Verdict(NamedTuple):
    """What ranks came to, as far as it needs to be told, and who of them is wrong."""

    copies: Copies
    wrong: tuple[int, ...]


class GradientVerification(Callback):
    """The recomputations of one generation.

    ``told``: a step that ranks disagreed on before: what they come to this time is told, though
    they agree.
    """

    def __init__(self, trainer: Trainer, every: int, told: tuple[int, int] = (0, 0)) -> None:
        mesh = trainer.mesh
        # Only then a rank's gradients of each micro-batch are its own work, and handed over.
        self.active = every > 0 and mesh.uses_fsdp and mesh.sizes["shard"] > 1
        self._every, self._told, self._world = every, told, mesh.world_size
        self._turn = 0  # rank whose micro-batch it is
        self._again: Tensor | None = None  # what the recomputation came to, during such a step
        self._verified = 0
        if self.active:
            self._sums = trainer.engine.sum_gradients()

    def before_forward(self, run: TrainingRun, batches: list[Batch], token_weight: Tensor) -> None:
        step = run.step + 1
        if not self.active or step % self._every:
            return
        if not self._verified:  # other kernels are chosen, or compiled, for the first time
            run.orders.busy(IS_VERIFYING, run.step)
        with run.trainer.timer.phase("verification"):
            self.recompute(run.trainer, step, batches, token_weight)

    def recompute(
        self, trainer: Trainer, step: int, batches: list[Batch], token_weight: Tensor
    ) -> None:
        """Compute the micro-batch whose turn it is, and have the step add it up too. Collective."""
        turn, self._turn = divmod(step // self._every, self._world)
        number = turn % len(batches)
        shared = [batches[number] if self._turn == trainer.mesh.rank else None]
        dist.broadcast_object_list(shared, src=self._turn, device=trainer.device)
        batch = shared[0]
        assert batch is not None
        self._again = trainer.engine.recompute(batch, token_weight)
        self._sums.micro_batch = number

    def before_update(self, run: TrainingRun) -> None:
        self.compare(run.step + 1)

    def compare(self, step: int) -> None:
        """Raises ``GradientDivergence`` on all ranks alike, before the update. Collective."""
        if self._again is None:
            return
        sums = torch.zeros(2, self._world, dtype=torch.int64, device=self._again.device)
        own = dist.get_rank()
        sums[0, own], sums[1, own] = self._sums.total, self._again
        self._again = None
        dist.all_reduce(sums)
        in_course, again = sums.tolist()
        verdict = judge(self._turn, in_course[self._turn], again)
        self._verified += 1
        if verdict is None:
            if step == self._told[0]:
                raise GradientDivergence(step, step - 1, tuple(enumerate(again)))
            return
        if not verdict.wrong and self._world > 2:
            log.error(NOT_DETERMINISTIC, step, verdict.copies)
            self.active = False
            return
        raise GradientDivergence(step, step - 1, verdict.copies, verdict.wrong)

    def end(self, run: TrainingRun, error: BaseException | None) -> None:
        if self._verified:
            run.details["verifications"] = self._verified


def judge(turn: int, in_course: int, again: Sequence[int]) -> Verdict | None:
    """Who is wrong, if anybody; nobody named: word stands against word.

    ``again``: what each rank's recomputation of rank ``turn``'s micro-batch came to;
    ``in_course``: what that rank itself came to in the course of its step.
    """
    usual, count = Counter(again).most_common(1)[0]
    if count == len(again) and in_course == usual:
        return None
    said = list(again)
    if in_course != usual:
        said[turn] = in_course
    copies = tuple(enumerate(said))
    if 2 * count > len(again):
        wrong = tuple(rank for rank, each in copies if each != usual)
        right = [copy for copy in copies if copy[1] == usual][: len(wrong) + 1]
        return Verdict(tuple(sorted([*right, *(copies[rank] for rank in wrong)])), wrong)
    if len(again) == 2 and in_course == again[1 - turn]:  # it contradicts itself and not the other
        return Verdict(tuple(enumerate(again)), (turn,))
    return Verdict(tuple(enumerate(again)), ())
