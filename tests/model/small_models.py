"""Small models with drawn weights, ready to run on CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from phalanx.config import Model, resolve_model
from phalanx.model import ForwardContext, Transformer, declarations, draw, key_of

SHAPE: dict[str, Any] = {
    "dim": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
    "vocab": 61,
}


def small_model(**fields: Any) -> Model:
    """A resolved shape of a few thousand parameters, with ``fields`` changed."""
    return resolve_model(Model(**{**SHAPE, **fields}))


def built(config: Model, sequence: int, *, seed: int = 0, gain: float = 10.0) -> Transformer:
    """The model with its weights drawn.

    ``gain`` widens the initial values, so that attention and routing tell tokens apart.
    """
    model = Transformer(config)
    found = dict(model.named_parameters())
    for name, declared in declarations(model):
        parameter, whole = found[name], tuple(found[name].shape)
        draw(
            parameter.data,
            replace(declared, std=gain * declared.std),
            config,
            key=key_of(seed, name),
            shape=whole,
            offset=(0,) * len(whole),
        )
    model.prepare(torch.arange(sequence))
    return model


def plain_context(model: Transformer, real: torch.Tensor | None = None) -> ForwardContext:
    """What the model would hand to its blocks for samples without packed documents."""
    return ForwardContext(
        model.cos, model.sin, mask=None, real=real, token_weight=model.token_weight
    )
