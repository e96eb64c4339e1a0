"""Exact parameter and FLOP counts of a model, in integers, without building it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from phalanx.config import Model, Moe, has_window, is_gated, resolve_model

Convention = Literal["causal", "palm"]
Recompute = Literal["none", "selective", "full"]


class ParameterCount(Struct, frozen=True):
    """Parameters of a model. ``active`` leaves out the experts that a token does not visit."""

    embedding: int
    head: int  # 0 when tied to the embedding
    final_norm: int
    per_layer: tuple[int, ...]
    active_per_layer: tuple[int, ...]
    prediction: int = 0  # layers that predict tokens further on
    active_prediction: int = 0

    @property
    def total(self) -> int:
        """All parameters."""
        layers = sum(self.per_layer) + self.prediction
        return self.embedding + layers + self.final_norm + self.head

    @property
    def active(self) -> int:
        """Parameters that one token uses, embedding and head included."""
        layers = sum(self.active_per_layer) + self.active_prediction
        return self.embedding + layers + self.final_norm + self.head


class ForwardFlops(Struct, frozen=True):
    """FLOPs of one token through forward, by part."""

    per_layer: tuple[int, ...]
    head: int  # a turn for the next token, and one for each that is predicted further on
    prediction: int = 0  # layers that do so


class StepFlops(Struct, frozen=True):
    """FLOPs of one token through forward and backward."""

    model_flops: int  # what the mathematics needs: MFU counts these
    hardware_flops: int  # with what recompute repeats: HFU counts these


def parameters(model: Model) -> ParameterCount:
    """Count the parameters of each part of a model."""
    model = resolve_model(model)
    embedding = model.vocab * model.dim
    layers = range(model.layers)
    return ParameterCount(
        embedding=embedding,
        head=0 if model.tied_embedding else embedding,
        final_norm=model.dim,
        per_layer=tuple(layer_parameters(model, layer) for layer in layers),
        active_per_layer=tuple(layer_parameters(model, layer, active=True) for layer in layers),
        prediction=_prediction_parameters(model, active=False),
        active_prediction=_prediction_parameters(model, active=True),
    )


def _prediction_parameters(model: Model, active: bool) -> int:
    """Of layers behind the last: a block, two states made one, and three norms each."""
    block = layer_parameters(model, model.layers, active)
    return prediction_layers(model) * (block + 2 * model.dim * model.dim + 3 * model.dim)


def prediction_layers(model: Model) -> int:
    """Layers behind the last that predict tokens further on."""
    return model.mtp.layers if model.mtp is not None else 0


def _all_layers(model: Model) -> range:
    return range(model.layers + prediction_layers(model))


def layer_parameters(model: Model, layer: int, active: bool = False) -> int:
    """Parameters of one block, of a resolved model; ``active`` counts only visited experts."""
    norms = (4 if model.norm == "sandwich" else 2) * model.dim
    vectors = norms + _attention_vectors(model) + _expert_biases(model, layer, active)
    return _attention_weights(model) + _mlp_weights(model, layer, active) + vectors


def flops_per_token(
    model: Model,
    sequence: int,
    convention: Convention = "causal",
    recompute: Recompute = "none",
    *,
    frozen: bool = False,
    reference: bool = False,
) -> StepFlops:
    """FLOPs of one token in a training step at this sequence length.

    A multiply-add is two FLOPs and backward costs twice the forward. The embedding is a lookup
    and counts nothing; norms, softmax and activations are left out. "causal" counts the half
    of the score matrix that is used, "palm" the whole of it. Selective recompute keeps the
    results of matmuls and attention, so it repeats nothing that is counted here. Weights that are
    ``frozen`` need no gradient of their own; a ``reference`` is one more forward pass. Adapters
    are small and count nothing.
    """
    forward = forward_flops_per_token(model, sequence, convention)
    blocks = sum(forward.per_layer) + forward.prediction
    model_flops = (4 if reference else 3) * (blocks + forward.head)
    if frozen:
        whole = resolve_model(model)
        model_flops -= sum(_weight_flops(whole, at) for at in _all_layers(whole)) + forward.head
    return StepFlops(model_flops, model_flops + (blocks if recompute == "full" else 0))


def forward_flops_per_token(
    model: Model, sequence: int, convention: Convention = "causal"
) -> ForwardFlops:
    """Forward FLOPs of one token in each layer and in the head."""
    model = resolve_model(model)

    def of_layer(layer: int) -> int:
        return _weight_flops(model, layer) + _score_flops(model, layer, sequence, convention)

    ahead = prediction_layers(model)
    return ForwardFlops(
        per_layer=tuple(of_layer(layer) for layer in range(model.layers)),
        head=(1 + ahead) * 2 * model.vocab * model.dim,
        prediction=ahead * (of_layer(model.layers) + 4 * model.dim * model.dim),
    )


def _weight_flops(model: Model, layer: int) -> int:
    """Forward FLOPs of one token in a layer's matrices."""
    return 2 * (_attention_weights(model) + _mlp_weights(model, layer, active=True))


def _attention_weights(model: Model) -> int:
    latent = model.latent
    if latent is None:
        rows = (model.heads + 2 * model.kv_heads) * model.head_dim
        return model.dim * rows + model.heads * model.head_dim * model.dim
    query_rows = model.heads * (latent.content_head_dim + latent.rope_head_dim)
    if latent.query_rank:
        query = (model.dim + query_rows) * latent.query_rank
    else:
        query = model.dim * query_rows
    down = model.dim * (latent.key_value_rank + latent.rope_head_dim)
    up = latent.key_value_rank * model.heads * (latent.content_head_dim + latent.value_head_dim)
    return query + down + up + model.heads * latent.value_head_dim * model.dim


def _attention_vectors(model: Model) -> int:
    if model.latent is not None:
        return model.latent.query_rank + model.latent.key_value_rank
    biases = (model.heads + 2 * model.kv_heads) * model.head_dim if model.attention_bias else 0
    biases += model.dim if model.attention_out_bias else 0
    biases += model.heads if model.attention_sinks else 0
    heads = model.heads + model.kv_heads if model.qk_norm_over == "all" else 2
    return biases + (heads * model.head_dim if model.qk_norm else 0)


def _expert_biases(model: Model, layer: int, active: bool) -> int:
    moe = model.moe
    if moe is None or not moe.biases or layer < moe.first_dense_layers:
        return 0
    visited = moe.top_k if active else moe.experts
    return moe.experts + visited * (2 * moe.ffn + model.dim)


def _mlp_weights(model: Model, layer: int, active: bool) -> int:
    moe = model.moe
    if moe is not None and layer >= moe.first_dense_layers:
        return _moe_weights(model, moe, active)
    return (3 if is_gated(model) else 2) * model.dim * model.ffn


def _moe_weights(model: Model, moe: Moe, active: bool) -> int:
    visited = moe.top_k if active else moe.experts
    router = model.dim * (moe.experts + moe.shared_gate)
    return router + 3 * model.dim * (visited * moe.ffn + moe.shared_ffn)


def _score_flops(model: Model, layer: int, sequence: int, convention: Convention) -> int:
    """Forward FLOPs of queries against keys and of scores against values, for one token."""
    latent = model.latent
    value_dim = model.head_dim if latent is None else latent.value_head_dim
    keys = sequence
    if has_window(model, layer) and model.window is not None:
        keys = min(model.window.size, sequence)
    each = model.heads * (model.head_dim + value_dim)
    if convention == "palm":
        return 2 * keys * each
    if keys == sequence:
        return sequence * each  # half of them, on average
    return (2 * keys - keys * keys // sequence) * each  # the first ones see fewer than the window


def attended_share(model: Model, sequence: int) -> float:
    """Scores that layers compute on average, of those that causal attention over all would."""
    if model.window is None:
        return 1.0
    full = sequence * sequence
    keys = min(model.window.size, sequence)
    near = 2 * keys * sequence - keys * keys
    windowed = sum(has_window(model, layer) for layer in range(model.layers))
    return (windowed * near + (model.layers - windowed) * full) / (model.layers * full)
