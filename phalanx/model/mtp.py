"""Multi-token prediction: layers behind the last that predict tokens further on (DeepSeek-V3)."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.config import Model
from phalanx.model.declare import REPLICATED, declare
from phalanx.model.layer import Layer
from phalanx.model.layers import ForwardContext, Linear, make_norm

NO_LABEL = -100  # weighs nothing in the loss
_classes: dict[type[Layer], type[Layer]] = {}  # made of others


class PredictionLayer(Layer):
    """Mixed into a model's own kind of layer: from the state of a token and the vector of one that
    follows, the state that predicts the token after that.
    """

    def __init__(self, config: Model, index: int) -> None:
        super().__init__(config, index)  # type: ignore[call-arg]  # of the class mixed with
        self.token_norm = make_norm(config, config.dim)
        self.state_norm = make_norm(config, config.dim)
        self.merge = Linear(2 * config.dim, config.dim)
        self.out_norm = make_norm(config, config.dim)
        declare(self.merge, weight=REPLICATED)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        assert context.following is not None
        both = torch.cat((self.token_norm(context.following), self.state_norm(x)), -1)
        out: Tensor = self.out_norm(super().forward(self.merge(both), context))
        return out


def prediction_class(base: type[Layer]) -> type[Layer]:
    """A kind of layer that predicts further on, made of any other kind; one for all of them."""
    if base not in _classes:
        _classes[base] = type(f"Prediction{base.__name__}", (PredictionLayer, base), {})
    return _classes[base]


def look_ahead(
    tokens: Tensor, labels: Tensor, documents: Tensor | None, depth: int
) -> tuple[Tensor, Tensor]:
    """The token and the label so many positions further, all [batch, seq].

    Behind the sample's end, and in another document, there is no label.
    """
    following, targets = tokens.roll(-depth, 1), labels.roll(-depth, 1)
    targets[:, -depth:] = NO_LABEL
    if documents is not None:
        other = documents.roll(-depth, 1) != documents
        targets = targets.masked_fill(other, NO_LABEL)
    return following, targets
