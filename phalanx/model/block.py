"""The block: attention and feed-forward beside a residual, in the form that a model has."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from phalanx.config import Model
from phalanx.config.own_code import load_class
from phalanx.model.attention import GroupedQueryAttention, LatentAttention
from phalanx.model.layer import Layer
from phalanx.model.layers import Dropout, ForwardContext, RMSNorm, dense_mlp, make_norm
from phalanx.model.moe import MoeLayer
from phalanx.model.mtp import prediction_class

OWN = "model.module"  # the setting that names a class


class Block(Layer):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    splits_sequence = True

    def __init__(self, config: Model, index: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(config, config.dim)
        attention = LatentAttention if config.latent else GroupedQueryAttention
        self.attention = attention(config, index)
        self.mlp_norm = make_norm(config, config.dim)
        sparse = config.moe is not None and index >= config.moe.first_dense_layers
        self.moe = MoeLayer(config.dim, config.moe, config.mlp) if sparse and config.moe else None
        self.mlp = None if sparse else dense_mlp(config)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        x, normed = self.attention_norm.join(x)
        x, normed = self.mlp_norm.join(x, self.attention(normed, context))
        return x + self.feed_forward(normed, context)

    def branches(self) -> list[nn.Module]:
        return [self.attention] if self.mlp is None else [self.attention, self.mlp]

    def feed_forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Experts, or the dense MLP."""
        if self.moe is not None:
            mixed: Tensor = self.moe(x, context)
            return mixed
        assert self.mlp is not None
        out: Tensor = self.mlp(x)
        return out


class ComposedBlock(Block):
    """A block of another form: norms on the results of branches, scaled branches, or dropout.

    What every block has keeps its name: ``attention_norm`` is the norm on attention's result where
    there is none before it.
    """

    def __init__(self, config: Model, index: int) -> None:
        super().__init__(config, index)
        self.norms_results = config.norm == "post"
        self.residual_scale = config.residual_scale
        both = config.norm == "sandwich"
        self.attention_out_norm = make_norm(config, config.dim) if both else None
        self.mlp_out_norm = make_norm(config, config.dim) if both else None
        self.attention_dropout = make_dropout(config)
        self.mlp_dropout = make_dropout(config)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        normed = x if self.norms_results else self.attention_norm(x)
        branch = self.attention(normed, context)
        branch = self._result(branch, self.attention_norm, self.attention_out_norm)
        x = x + drop(branch, self.attention_dropout, context)
        normed = x if self.norms_results else self.mlp_norm(x)
        branch = self.feed_forward(normed, context)
        branch = self._result(branch, self.mlp_norm, self.mlp_out_norm)
        return x + drop(branch, self.mlp_dropout, context)

    def _result(self, branch: Tensor, norm: RMSNorm, out_norm: RMSNorm | None) -> Tensor:
        """What a branch adds to the stream, before any of it is dropped."""
        last = norm if self.norms_results else out_norm
        if last is not None:
            branch = last(branch)
        return branch if self.residual_scale == 1.0 else branch * self.residual_scale


def make_dropout(config: Model) -> Dropout | None:
    """Of one place, where the model has any."""
    return Dropout(config.dropout) if config.dropout else None


def drop(x: Tensor, dropout: Dropout | None, context: ForwardContext) -> Tensor:
    """A part of the values, where the model drops any."""
    if dropout is None:
        return x
    out: Tensor = dropout(x, context.token_keys)
    return out


def make_block(config: Model, index: int) -> Layer:
    """A layer: of the class that a job names, or a block. Fused kernels know the plain form.

    Those behind the model's last one predict tokens further on.
    """
    own = load_class(OWN, config.module, nn.Module) if config.module else Block
    plain = config.norm == "pre" and not config.norm_offset and config.residual_scale == 1.0
    plain = plain and not config.dropout
    layer_class: type[Layer] = Block if plain else ComposedBlock
    if issubclass(own, Layer) and own is not Block:
        layer_class = own
    if index >= config.layers:
        layer_class = prediction_class(layer_class)
    return cast(Layer, cast(Any, layer_class)(config, index))
