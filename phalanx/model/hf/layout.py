"""Which tensors of a Hugging Face folder make which of ours.

Both sides rotate the two halves of a head, so rows of q and k keep their order (DeepSeek rotates
neighbours: its rows are put in our order); else only the fused matrices (queries with keys and
values, gates with ups, stacked experts) are rearranged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.config import LatentAttentionShape, Model, gate_up_groups

# Our norms of a block by their place, and what stands before "layernorm" in theirs.
NORMS = {
    "pre": {"attention_norm": "input_", "mlp_norm": "post_attention_"},
    "post": {"attention_norm": "post_attention_", "mlp_norm": "post_feedforward_"},
    "sandwich": {
        "attention_norm": "input_",
        "attention_out_norm": "post_attention_",
        "mlp_norm": "pre_feedforward_",
        "mlp_out_norm": "post_feedforward_",
    },
}


@dataclass(frozen=True)
class TensorSource:
    """Tensors of a folder that together make one of ours, and how."""

    pieces: tuple[tuple[str, tuple[int, ...]], ...]  # name and shape
    fuse: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True)
class Rule:
    """Where one of our tensors comes from. The first source is the one that is exported."""

    fqn: str
    shape: tuple[int, ...]
    sources: tuple[TensorSource, ...]
    keep: torch.dtype | None = None  # exported in this type, whatever the others are


def rules(model: Model, model_type: str) -> Iterator[Rule]:
    """Every tensor of a resolved model, in the order of the forward pass."""
    yield _same("embed.weight", "model.embed_tokens.weight", (model.vocab, model.dim))
    for layer in range(model.layers):
        yield from _layer_rules(model, model_type, layer)
    yield _same("norm.weight", "model.norm.weight", (model.dim,))
    for depth in range(model.mtp.layers if model.mtp is not None else 0):
        yield from _prediction_rules(model, model_type, depth)
    head = "model.embed_tokens.weight" if model.tied_embedding else "lm_head.weight"
    yield _same("head.weight", head, (model.vocab, model.dim))


def copies(model: Model) -> list[Rule]:
    """Tensors that are stored once more with each layer that predicts tokens further on."""
    shape = (model.vocab, model.dim)
    head = "embed.weight" if model.tied_embedding else "head.weight"
    depths = range(model.mtp.layers if model.mtp is not None else 0)
    return [
        _same(ours, prediction_prefix(model, depth) + theirs, shape)
        for depth in depths
        for ours, theirs in (
            ("embed.weight", "embed_tokens.weight"),
            (head, "shared_head.head.weight"),
        )
    ]


def prediction_prefix(model: Model, depth: int) -> str:
    """Of the tensors of a layer that predicts tokens further on: it is numbered as the next."""
    return f"model.layers.{model.layers + depth}."


def _prediction_rules(model: Model, model_type: str, depth: int) -> Iterator[Rule]:
    layer, dim = model.layers + depth, model.dim
    ours, theirs = f"layers.{layer}.", prediction_prefix(model, depth)
    yield _same(ours + "token_norm.weight", theirs + "enorm.weight", (dim,))
    yield _same(ours + "state_norm.weight", theirs + "hnorm.weight", (dim,))
    yield _same(ours + "merge.weight", theirs + "eh_proj.weight", (dim, 2 * dim))
    yield from _layer_rules(model, model_type, layer)
    yield _same(ours + "out_norm.weight", theirs + "shared_head.norm.weight", (dim,))


def _layer_rules(model: Model, model_type: str, layer: int) -> Iterator[Rule]:
    ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
    dim, attention = model.dim, theirs + "self_attn."
    for name, norm in NORMS[model.norm].items():
        yield _same(f"{ours}{name}.weight", f"{theirs}{norm}layernorm.weight", (dim,))
    if model.latent is not None:
        yield from _latent_rules(model, model.latent, ours + "attention.", attention)
    else:
        yield from _grouped_rules(model, ours, attention)
    if model_type == "gpt_oss":
        yield from _gpt_oss_rules(model, ours + "moe.", theirs + "mlp.")
    elif model.moe is not None and layer >= model.moe.first_dense_layers:
        yield from _moe_rules(model, model_type, ours + "moe.", theirs)
    else:
        yield from _gated(ours + "mlp.", theirs + "mlp.", model.ffn, dim)


def _grouped_rules(model: Model, ours: str, attention: str) -> Iterator[Rule]:
    dim, head_dim = model.dim, model.head_dim
    yield _qkv(ours + "attention.qkv.", attention, "weight", model, (dim,))
    if model.attention_bias:
        yield _qkv(ours + "attention.qkv.", attention, "bias", model, ())
    if model.qk_norm:
        over_all = model.qk_norm_over == "all"
        for name, heads in (("q_norm", model.heads), ("k_norm", model.kv_heads)):
            width = (heads * head_dim if over_all else head_dim,)
            yield _same(f"{ours}attention.{name}.weight", f"{attention}{name}.weight", width)
    out_shape = (dim, model.heads * head_dim)
    yield _same(ours + "attention.out.weight", attention + "o_proj.weight", out_shape)
    if model.attention_out_bias:
        yield _same(ours + "attention.out.bias", attention + "o_proj.bias", (dim,))
    if model.attention_sinks:
        yield _same(ours + "attention.sinks", attention + "sinks", (model.heads,))


def _latent_rules(
    model: Model, latent: LatentAttentionShape, ours: str, theirs: str
) -> Iterator[Rule]:
    rank, narrow = latent.query_rank, latent.key_value_rank
    content, rope, heads = latent.content_head_dim, latent.rope_head_dim, model.heads
    query = "q_b_proj" if rank else "q_proj"
    if rank:
        yield _same(ours + "q_down.weight", theirs + "q_a_proj.weight", (rank, model.dim))
        yield _same(ours + "q_norm.weight", theirs + "q_a_layernorm.weight", (rank,))
    shape = (heads * (content + rope), rank or model.dim)
    yield _rotary(ours + "q_up.weight", f"{theirs}{query}.weight", shape, content, rope)
    shape = (narrow + rope, model.dim)
    down = theirs + "kv_a_proj_with_mqa.weight"
    yield _rotary(ours + "kv_down.weight", down, shape, narrow, rope)
    yield _same(ours + "kv_norm.weight", theirs + "kv_a_layernorm.weight", (narrow,))
    shape = (heads * (content + latent.value_head_dim), narrow)
    yield _same(ours + "kv_up.weight", theirs + "kv_b_proj.weight", shape)
    shape = (model.dim, heads * latent.value_head_dim)
    yield _same(ours + "out.weight", theirs + "o_proj.weight", shape)


def _rotary(fqn: str, name: str, shape: tuple[int, int], before: int, rope: int) -> Rule:
    """Rows by head, each ending in pairs of neighbours that RoPE turns: ours are its halves."""
    pairs = torch.arange(before, before + rope)
    order = torch.cat((torch.arange(before), pairs[0::2], pairs[1::2]))
    back = order.argsort()
    source = TensorSource(
        ((name, shape),),
        lambda parts: parts[0].view(-1, before + rope, shape[1])[:, order].reshape(shape),
        lambda whole: [whole.view(-1, before + rope, shape[1])[:, back].reshape(shape)],
    )
    return Rule(fqn, shape, (source,))


def _moe_rules(model: Model, model_type: str, ours: str, theirs: str) -> Iterator[Rule]:
    """Experts lie one by one in files, or stacked as transformers 5 holds them in memory."""
    assert model.moe is not None
    experts, ffn, dim = model.moe.experts, model.moe.ffn, model.dim
    block, gate, up, down = theirs + "mlp.", "gate_proj", "up_proj", "down_proj"
    if model_type == "mixtral":
        block, gate, up, down = theirs + "block_sparse_moe.", "w1", "w3", "w2"
    router = (experts, dim)
    yield Rule(
        ours + "router.weight",
        router,
        (_alone(block + "gate.weight", router), _alone(theirs + "mlp.gate.weight", router)),
    )
    pairs = [
        (f"{block}experts.{expert}.{name}.weight", (ffn, dim))
        for expert in range(experts)
        for name in (gate, up)
    ]
    singles = [(f"{block}experts.{e}.{down}.weight", (dim, ffn)) for e in range(experts)]
    for fqn, pieces, shape in (
        ("gate_up", pairs, (experts, 2 * ffn, dim)),
        ("down", singles, (experts, dim, ffn)),
    ):
        stacked = f"{theirs}mlp.experts.{fqn}_proj"
        sources = (_stack(pieces, shape), _alone(stacked, shape))
        yield Rule(f"{ours}experts.{fqn}", shape, sources)
    if model_type == "qwen2_moe":
        gate_shape = (1, dim)
        yield _same(ours + "shared_gate.weight", block + "shared_expert_gate.weight", gate_shape)
        yield from _gated(ours + "shared.", block + "shared_expert.", model.moe.shared_ffn, dim)
    if model_type == "deepseek_v3":
        bias = _alone(block + "gate.e_score_correction_bias", (experts,))
        yield Rule(ours + "router.expert_bias", (experts,), (bias,), keep=torch.float32)
        yield from _gated(
            ours + "shared.", theirs + "mlp.shared_experts.", model.moe.shared_ffn, dim
        )


def _gpt_oss_rules(model: Model, ours: str, theirs: str) -> Iterator[Rule]:
    """Experts are stacked with inputs before outputs; gates and ups take turns."""
    assert model.moe is not None
    experts, ffn, dim = model.moe.experts, model.moe.ffn, model.dim
    yield _same(ours + "router.weight", theirs + "router.weight", (experts, dim))
    yield _same(ours + "router.bias", theirs + "router.bias", (experts,))
    name = theirs + "experts.gate_up_proj"
    gate_up = TensorSource(
        ((name, (experts, dim, 2 * ffn)),),
        lambda parts: _gates_first(parts[0].mT, ffn),
        lambda whole: [_gates_in_turn(whole, ffn).mT],
    )
    biases = TensorSource(
        ((name + "_bias", (experts, 2 * ffn)),),
        lambda parts: _gates_first(parts[0], ffn),
        lambda whole: [_gates_in_turn(whole, ffn)],
    )
    down = TensorSource(
        ((theirs + "experts.down_proj", (experts, ffn, dim)),),
        lambda parts: parts[0].mT,
        lambda whole: [whole.mT],
    )
    yield Rule(ours + "experts.gate_up", (experts, 2 * ffn, dim), (gate_up,))
    yield Rule(ours + "experts.gate_up_bias", (experts, 2 * ffn), (biases,))
    yield Rule(ours + "experts.down", (experts, dim, ffn), (down,))
    yield _same(ours + "experts.down_bias", theirs + "experts.down_proj_bias", (experts, dim))


def _gates_first(rows: Tensor, ffn: int) -> Tensor:
    """[experts, 2 ffn, ...] of a gate, its up, the next gate: all gates, then all ups."""
    ordered: Tensor = rows.unflatten(1, (ffn, 2)).transpose(1, 2).flatten(1, 2)
    return ordered


def _gates_in_turn(rows: Tensor, ffn: int) -> Tensor:
    ordered: Tensor = rows.unflatten(1, (2, ffn)).transpose(1, 2).flatten(1, 2)
    return ordered


def _alone(name: str, shape: tuple[int, ...]) -> TensorSource:
    return TensorSource(((name, shape),), lambda pieces: pieces[0], lambda whole: [whole])


def _same(fqn: str, name: str, shape: tuple[int, ...]) -> Rule:
    return Rule(fqn, shape, (_alone(name, shape),))


def _stack(pieces: Sequence[tuple[str, tuple[int, ...]]], shape: tuple[int, ...]) -> TensorSource:
    """Matrices one after another: experts, each with its gate rows before its up rows."""
    piece_shape = pieces[0][1]
    return TensorSource(
        tuple(pieces),
        lambda parts: torch.stack(tuple(parts)).view(shape),
        lambda whole: whole.reshape(-1, *piece_shape).unbind(0),
    )


def _qkv(ours: str, theirs: str, name: str, model: Model, rest: tuple[int, ...]) -> Rule:
    """Rows grouped by key/value head: its queries, its key, its value. ``rest``: a row's shape."""
    kv, head_dim = model.kv_heads, model.head_dim
    widths = (model.heads // kv, 1, 1)
    pieces = tuple(
        (f"{theirs}{part}_proj.{name}", (kv * width * head_dim, *rest))
        for part, width in zip("qkv", widths, strict=True)
    )
    source = TensorSource(
        pieces,
        lambda parts: torch.cat([p.view(kv, -1, head_dim, *rest) for p in parts], 1).flatten(0, 2),
        lambda whole: [
            part.flatten(0, 2)
            for part in torch.split(whole.view(kv, -1, head_dim, *rest), list(widths), 1)
        ],
    )
    return Rule(ours + name, (kv * sum(widths) * head_dim, *rest), (source,))


def _gated(ours: str, theirs: str, ffn: int, dim: int) -> Iterator[Rule]:
    """A gated MLP: gate and up rows in alternating groups, and the way down."""
    groups = gate_up_groups(ffn)
    source = TensorSource(
        tuple((f"{theirs}{name}_proj.weight", (ffn, dim)) for name in ("gate", "up")),
        lambda parts: torch.stack([p.view(groups, -1, dim) for p in parts], 1).flatten(0, 2),
        lambda whole: [
            part.flatten(0, 1) for part in whole.view(groups, 2, ffn // groups, dim).unbind(1)
        ],
    )
    yield Rule(ours + "gate_up.weight", (2 * ffn, dim), (source,))
    yield _same(ours + "down.weight", theirs + "down_proj.weight", (dim, ffn))
