"""What a layer is made of, by its number: patterns over layers, and forms of the MLP."""

from __future__ import annotations

from phalanx.config.schema import Model

PLAIN_MLPS = ("gelu", "gelu-exact", "relu2")  # two matrices; the others have a gate as well


def is_gated(model: Model) -> bool:
    """Whether the dense MLP has a gate: three matrices, not two."""
    return model.mlp not in PLAIN_MLPS


def has_window(model: Model, layer: int) -> bool:
    """Whether a layer sees the nearest tokens only."""
    window = model.window
    return window is not None and not _is_each(layer, window.full_every)


def rotated_width(model: Model, layer: int) -> int:
    """Leading dimensions of a head that RoPE rotates in a layer; latent heads have their own."""
    return 0 if _is_each(layer, model.nope_every) else int(model.head_dim * model.rotary_fraction)


def _is_each(layer: int, every: int) -> bool:
    return every > 0 and (layer + 1) % every == 0
