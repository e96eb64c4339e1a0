"""Direct preference optimization: of two answers the preferred one becomes more probable.

Both answers are documents of one sample, the preferred first. What counts is how much more
probable each has become than it was to the same model without its adapters, the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.config import Preference
from phalanx.model.loss import TokenLoss
from phalanx.model.post_training.adapters import without_adapters
from phalanx.model.transformer import Transformer


class PairSums(NamedTuple):
    """Over the pairs seen since they were last asked for, as scalars on the device."""

    chosen: Tensor  # rewards: beta times the change of an answer's log-probability
    rejected: Tensor
    preferred: Tensor  # pairs whose preferred answer has the higher reward
    pairs: Tensor


class PairLoss(TokenLoss):
    """DPO's loss of pairs. ``documents`` and ``reference`` are those of the current micro-batch."""

    def __init__(self, settings: Preference) -> None:
        self.beta = settings.beta
        self.documents: Tensor | None = None  # [batch, seq]
        self.reference: Tensor | None = None  # [batch, pairs, 2]; None: it is what is asked for
        self.notes = True  # whether pairs count in the sums
        self._sums: Tensor | None = None

    def total(self, logits: Tensor, labels: Tensor, token_weight: Tensor) -> Tensor:
        """The loss, times the weight of a pair; without a reference, the answers' scores."""
        scores, answered = self._scores(logits, labels)
        if self.reference is None:
            return scores
        rewards = self.beta * (scores - self.reference)
        margins = rewards[..., 0] - rewards[..., 1]
        if self.notes and torch.is_grad_enabled():  # a validation is no training
            self._note(rewards.detach(), answered)
        return -(F.logsigmoid(margins) * answered).sum() * token_weight

    def _scores(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of each answer [batch, pairs, 2], and which pairs there are."""
        assert self.documents is not None
        real = labels >= 0
        flat = logits.flatten(0, -2).float()
        losses = F.cross_entropy(flat, labels.flatten().clamp(min=0), reduction="none")
        # As many documents as there could be: their real number would have to be asked for.
        slots = labels.shape[1] + labels.shape[1] % 2
        numbers = self.documents.long()
        empty = losses.new_zeros(labels.shape[0], slots)
        scores = empty.scatter_add(1, numbers, -losses.view(labels.shape) * real)
        answers = empty.scatter_add(1, numbers, real.to(empty.dtype)) > 0
        return scores.unflatten(1, (-1, 2)), answers.unflatten(1, (-1, 2)).all(-1)

    def _note(self, rewards: Tensor, answered: Tensor) -> None:
        better = (rewards[..., 0] > rewards[..., 1]) & answered
        kept = rewards * answered.unsqueeze(-1)
        found = torch.stack((*kept.sum((0, 1)).unbind(), better.sum(), answered.sum()))
        self._sums = found if self._sums is None else self._sums + found

    def take_sums(self, device: torch.device) -> PairSums:
        """What was noted since the last call."""
        sums = torch.zeros(len(PairSums._fields), device=device)
        if self._sums is not None:
            sums += self._sums
        self._sums = None
        return PairSums(*sums.unbind())


class PreferenceModel(Transformer):
    """With labels, the loss of pairs: a pass without adapters, which is constant, and one with."""

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        documents: Tensor | None = None,
        tokens: Tensor | None = None,
        samples: Tensor | None = None,
    ) -> Tensor:
        if labels is None or self.head is None or self.head.scores_rows:
            return super().forward(x, labels, documents, tokens, samples)
        loss = self.head.own_loss
        assert isinstance(loss, PairLoss) and documents is not None
        loss.documents, loss.reference = documents, None
        with torch.no_grad(), without_adapters(self):
            scores = super().forward(x, labels, documents)
        loss.reference = scores[0]
        return super().forward(x, labels, documents)


def prefer(part: Transformer, settings: Preference) -> Transformer:
    """Have a model part learn from pairs."""
    if settings.kind != "none":
        assert type(part) is Transformer and part.head is not None
        part.__class__ = PreferenceModel
        part.head.own_loss = PairLoss(settings)
    return part


def pair_loss_of(part: Transformer) -> PairLoss | None:
    """The loss of pairs that a model part has; None: it has another one."""
    loss = None if part.head is None else part.head.own_loss
    return loss if isinstance(loss, PairLoss) else None


@contextmanager
def without_notes(part: Transformer) -> Iterator[None]:
    """Inside, what is computed is no part of a step: no pair is noted."""
    loss = pair_loss_of(part)
    if loss is not None:
        loss.notes = False
    try:
        yield
    finally:
        if loss is not None:
            loss.notes = True
