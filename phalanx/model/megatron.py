"""Which tensors of a Megatron-core checkpoint make which of ours.

Queries, keys and values lie by key/value head and RoPE turns the halves of a head, as here; gates
stand before ups. Layers are stacked in one tensor or stand alone, by the version and the options
of what wrote them, and so do experts and the two halves of a gated matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.config import Model, gate_up_groups, has_expert_bias

GATED = ("swiglu", "geglu", "geglu-exact")


@dataclass(frozen=True)
class StoredPart:
    """One stored tensor, or the part of it at the first indices."""

    name: str
    indices: tuple[int, ...]
    shape: tuple[int, ...]  # of the part


@dataclass(frozen=True)
class MegatronRule:
    """Where one of our tensors comes from: the first form whose names are all stored."""

    fqn: str
    forms: tuple[tuple[StoredPart, ...], ...]
    fuse: Callable[[Sequence[Tensor]], Tensor]
    padded: bool = False  # rows beyond ours fill the vocabulary up


def unknown_features(model: Model) -> list[str]:
    """Settings of a resolved model whose form in Megatron's checkpoints is not known here."""
    moe = model.moe
    features: dict[str, Any] = {
        "model.module": model.module,
        "model.latent": model.latent,
        "model.mtp": model.mtp,
        "model.attention_sinks": model.attention_sinks,
        "model.attention_out_bias": model.attention_out_bias,
        f'model.norm = "{model.norm}"': model.norm != "pre",
        f'model.mlp = "{model.mlp}"': model.mlp not in GATED,
        'model.qk_norm_over = "all"': model.qk_norm and model.qk_norm_over == "all",
        "model.moe.shared_gate": moe is not None and moe.shared_gate,
        "model.moe.biases": moe is not None and moe.biases,
    }
    return [name for name, used in features.items() if used]


def megatron_rules(model: Model) -> Iterator[MegatronRule]:
    """Every tensor of a resolved model, in the order of the forward pass."""
    table = (model.vocab, model.dim)
    yield _whole("embed.weight", "embedding.word_embeddings.weight", table, padded=True)
    for layer in range(model.layers):
        yield from _layer_rules(model, layer)
    yield _whole("norm.weight", "decoder.final_layernorm.weight", (model.dim,))
    head = "embedding.word_embeddings" if model.tied_embedding else "output_layer"
    yield _whole("head.weight", f"{head}.weight", table, padded=True)


def _layer_rules(model: Model, layer: int) -> Iterator[MegatronRule]:
    ours, dim, head_dim = f"layers.{layer}.", model.dim, model.head_dim
    attention = "self_attention."
    fused = attention + "linear_qkv.layer_norm_weight"
    norms = (fused, "input_layernorm.weight")
    yield _layered(f"{ours}attention_norm.weight", layer, norms, (dim,))
    rows = (model.heads + 2 * model.kv_heads) * head_dim
    qkv = attention + "linear_qkv."
    yield _layered(f"{ours}attention.qkv.weight", layer, (qkv + "weight",), (rows, dim))
    if model.attention_bias:
        yield _layered(f"{ours}attention.qkv.bias", layer, (qkv + "bias",), (rows,))
    if model.qk_norm:
        for side in "qk":
            name = f"{attention}{side}_layernorm.weight"
            yield _layered(f"{ours}attention.{side}_norm.weight", layer, (name,), (head_dim,))
    out = (attention + "linear_proj.weight",)
    yield _layered(f"{ours}attention.out.weight", layer, out, (dim, model.heads * head_dim))
    norms = ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
    yield _layered(f"{ours}mlp_norm.weight", layer, norms, (dim,))
    if model.moe is not None and layer >= model.moe.first_dense_layers:
        yield from _moe_rules(model, layer)
    else:
        yield from _gated(f"{ours}mlp.", layer, "mlp.", model.ffn, dim)


def _moe_rules(model: Model, layer: int) -> Iterator[MegatronRule]:
    assert model.moe is not None
    ours, experts, dim = f"layers.{layer}.moe.", model.moe.experts, model.dim
    router = ("mlp.router.weight",)
    yield _layered(f"{ours}router.weight", layer, router, (experts, dim))
    if has_expert_bias(model.moe):
        bias = ("mlp.router.expert_bias",)
        yield _layered(f"{ours}router.expert_bias", layer, bias, (experts,))
    ffn = model.moe.ffn
    yield _experts(f"{ours}experts.gate_up", layer, "linear_fc1", experts, (2 * ffn, dim))
    yield _experts(f"{ours}experts.down", layer, "linear_fc2", experts, (dim, ffn))
    if model.moe.shared_ffn:
        shared = "mlp.shared_experts."
        yield from _gated(f"{ours}shared.", layer, shared, model.moe.shared_ffn, dim)


def _gated(ours: str, layer: int, theirs: str, ffn: int, dim: int) -> Iterator[MegatronRule]:
    """A gated MLP: gates, then ups, here in alternating groups; and the way down."""
    groups = gate_up_groups(ffn)

    def alternate(parts: Sequence[Tensor]) -> Tensor:
        gates_and_ups = torch.cat(tuple(parts)).view(2, groups, -1, dim)
        ordered: Tensor = gates_and_ups.transpose(0, 1).reshape(2 * ffn, dim)
        return ordered

    forms = _halves(layer, f"{theirs}linear_fc1.weight", (2 * ffn, dim))
    yield MegatronRule(f"{ours}gate_up.weight", tuple(forms), alternate)
    yield _layered(f"{ours}down.weight", layer, (f"{theirs}linear_fc2.weight",), (dim, ffn))


def _experts(
    fqn: str, layer: int, matrix: str, experts: int, shape: tuple[int, int]
) -> MegatronRule:
    """Experts in one tensor, or each in its own, with its gates and ups in one or in two."""
    place = "mlp.experts.experts."
    forms = _at(layer, f"{place}{matrix}.weight", (experts, *shape))
    for name in (f"{place}{{}}.{matrix}.weight", f"{place}{matrix}.weight{{}}"):
        each = [_halves(layer, name.format(expert), shape) for expert in range(experts)]
        forms += [sum(form, ()) for form in zip(*each, strict=True)]
    whole = (experts, *shape)
    return MegatronRule(fqn, tuple(forms), lambda parts: _join(parts, whole))


def _join(parts: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    return (parts[0] if len(parts) == 1 else torch.cat(tuple(parts))).reshape(shape)


def _halves(layer: int, name: str, shape: tuple[int, int]) -> list[tuple[StoredPart, ...]]:
    """A gated matrix whole, or gates and ups in tensors of their own."""
    half = (shape[0] // 2, shape[1])
    gates, ups = _at(layer, f"{name}_w", half), _at(layer, f"{name}_v", half)
    return _at(layer, name, shape) + [g + u for g, u in zip(gates, ups, strict=True)]


def _at(layer: int, name: str, shape: tuple[int, ...]) -> list[tuple[StoredPart, ...]]:
    """A layer's tensor among those of all layers, or alone."""
    return [
        (StoredPart(f"decoder.layers.{name}", (layer,), shape),),
        (StoredPart(f"decoder.layers.{layer}.{name}", (), shape),),
    ]


def _layered(fqn: str, layer: int, names: Sequence[str], shape: tuple[int, ...]) -> MegatronRule:
    forms = [form for name in names for form in _at(layer, name, shape)]
    return MegatronRule(fqn, tuple(forms), lambda parts: parts[0])


def _whole(fqn: str, name: str, shape: tuple[int, ...], *, padded: bool = False) -> MegatronRule:
    part = StoredPart(name, (), shape)
    return MegatronRule(fqn, ((part,),), lambda parts: parts[0], padded)
