"""A loss of one's own, from logits; ours never holds all of them (`phalanx/model/loss.py`)."""

from __future__ import annotations

from torch import Tensor


class TokenLoss:
    """A loss of each token; derive from it and name the class in ``model.loss``."""

    def of_tokens(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits [tokens, vocab], labels [tokens] -> losses [tokens]; labels are >= 0."""
        raise NotImplementedError

    def total(self, logits: Tensor, labels: Tensor, token_weight: Tensor) -> Tensor:
        """Sum over real labels, times the weight of a token. logits: [..., vocab]."""
        flat, real = labels.flatten(), labels.flatten() >= 0
        losses = self.of_tokens(logits.flatten(0, -2).float(), flat.clamp(min=0))
        return (losses * real).sum() * token_weight
