"""Refuses shapes that make no model, and forms of blocks that an axis cannot split."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.config.errors import ConfigProblem, problem
from phalanx.config.presets import PRESETS
from phalanx.config.resolve import ring_computes
from phalanx.config.rules.numbers import nearest_divisor
from phalanx.config.schema import Job, LatentAttentionShape, Model, Moe

SHAPE = ("dim", "layers", "heads", "vocab")
MOST_PARAMETERS = 10**16  # ten thousand times the largest preset
# Settings of grouped-query attention, with the value that means nothing.
GROUPED_ONLY = {
    "window": None,
    "nope_every": 0,
    "rotary_fraction": 1.0,
    "attention_bias": False,
    "attention_out_bias": False,
    "attention_sinks": False,
}
EXPERT_FORMS = ("swiglu", "swiglu-clamped")


def form_problems(job: Job) -> Iterator[ConfigProblem]:
    """Every reason why a resolved job's axes cannot split the form of its blocks."""
    axes, model = job.parallel, job.model
    if model.qk_norm and model.qk_norm_over == "all" and axes.tensor > 1:
        yield problem(
            "parallel.tensor",
            axes.tensor,
            'model.qk_norm_over = "all" needs every head of a token, and a rank holds some',
            'set it to 1, or model.qk_norm_over = "head"',
            [{"parallel.tensor": 1}],
        )
    if axes.context > 1 and axes.context_method == "ring" and not ring_computes(model):
        rule = "model.window needs the nearest tokens, and the ring shows keys rank by rank"
        if model.window is None and model.qk_clip:
            rule = "model.qk_clip needs the largest scores, and the ring's kernels give none"
        elif model.window is None:
            form = "attention_sinks" if model.attention_sinks else "attention_softcap"
            rule = f"model.{form} changes the softmax, and the ring's kernels know the plain one"
        yield problem(
            "parallel.context_method",
            '"ring"',
            rule,
            'set it to "ulysses"',
            [{"parallel.context_method": "ulysses"}],
            [{"parallel.context": 1}],
        )


def model_problems(model: Model) -> Iterator[ConfigProblem]:
    """Every reason why a resolved model cannot be built."""
    missing = [name for name in SHAPE if not getattr(model, name)]
    if len(missing) == len(SHAPE):
        known = ", ".join(PRESETS)
        yield problem("model", "", "no shape is given", f"set model.preset to one of {known}")
        return
    for name in missing:
        yield problem(f"model.{name}", 0, "must be at least 1", "give it, or name a model.preset")
    dense = model.moe is None or model.moe.first_dense_layers
    if dense and not model.ffn:
        yield problem("model.ffn", 0, "dense layers need a hidden width", f"try {4 * model.dim}")
    if missing:
        return
    yield from _size(model)
    if model.latent is not None:
        yield from _latent(model, model.latent)
    else:
        yield from _heads(model)
    yield from _positions(model)
    yield from _window(model)
    if model.moe is not None:
        yield from _moe(model, model.moe)


def _size(model: Model) -> Iterator[ConfigProblem]:
    experts = model.moe.experts * model.moe.ffn if model.moe is not None else 0
    layer = model.dim * (2 * model.heads * model.head_dim + 3 * max(model.ffn, experts))
    if model.layers * layer > MOST_PARAMETERS:
        yield problem(
            "model.layers",
            model.layers,
            f"makes a model of more than 10^16 parameters, at about {layer:.1e} a layer",
            f"nearest: {max(1, MOST_PARAMETERS // layer)}, or lower model.dim and model.ffn",
        )


def _heads(model: Model) -> Iterator[ConfigProblem]:
    if model.heads % model.kv_heads:
        yield problem(
            "model.kv_heads",
            model.kv_heads,
            f"must divide model.heads ({model.heads})",
            f"nearest: {nearest_divisor(model.heads, model.kv_heads)}",
        )
    if model.head_dim * model.heads != model.dim and model.head_dim == model.dim // model.heads:
        yield problem(
            "model.heads",
            model.heads,
            f"must divide model.dim ({model.dim}), or give model.head_dim",
            f"nearest: {nearest_divisor(model.dim, model.heads)}",
        )
    rotated = int(model.head_dim * model.rotary_fraction)
    if model.head_dim % 2:
        yield problem(
            "model.head_dim",
            model.head_dim,
            "must be even, since RoPE rotates pairs",
            f"nearest: {model.head_dim + 1}",
        )
    elif rotated % 2 or not rotated:
        yield problem(
            "model.rotary_fraction",
            model.rotary_fraction,
            f"rotates {rotated} of {model.head_dim} dimensions: must be even and above 0",
            f"nearest: {max(2, 2 * (rotated // 2)) / model.head_dim}",
        )
    if model.qk_norm_over == "all" and not model.qk_norm:
        yield problem("model.qk_norm_over", '"all"', "there is no norm", "set model.qk_norm = true")


def _latent(model: Model, latent: LatentAttentionShape) -> Iterator[ConfigProblem]:
    if model.kv_heads != model.heads:
        yield problem(
            "model.kv_heads",
            model.kv_heads,
            "latent attention has as many key/value heads as heads",
            f"set it to {model.heads} or leave it out",
        )
    if latent.rope_head_dim % 2:
        yield problem(
            "model.latent.rope_head_dim",
            latent.rope_head_dim,
            "must be even, since RoPE rotates pairs",
            f"nearest: {latent.rope_head_dim + 1}",
        )
    if model.qk_norm:
        yield problem(
            "model.qk_norm",
            True,
            "latent attention normalises the compressed queries and keys instead",
            "set it to false",
        )
    for name, neutral in GROUPED_ONLY.items():
        if (value := getattr(model, name)) != neutral:
            shown = "a window" if name == "window" else value
            rule = "belongs to grouped-query attention, and model.latent is set"
            yield problem(f"model.{name}", shown, rule, "leave it out")


def _moe(model: Model, moe: Moe) -> Iterator[ConfigProblem]:
    if moe.top_k > moe.experts:
        yield problem(
            "model.moe.top_k",
            moe.top_k,
            f"must be at most model.moe.experts ({moe.experts})",
            f"nearest: {moe.experts}",
        )
    if moe.first_dense_layers >= model.layers:
        yield problem(
            "model.moe.first_dense_layers",
            moe.first_dense_layers,
            f"leaves none of the {model.layers} layers to the experts",
            f'nearest: {model.layers - 1}, or set model.moe = "none"',
        )
    yield from _groups(moe)
    if moe.shared_ffn and not moe.shared_experts:
        yield problem(
            "model.moe.shared_ffn",
            moe.shared_ffn,
            "needs shared experts",
            "set model.moe.shared_experts = 1",
        )
    if moe.shared_gate and not moe.shared_experts:
        fix = "set model.moe.shared_experts = 1"
        yield problem("model.moe.shared_gate", True, "needs shared experts", fix)
    if model.mlp not in EXPERT_FORMS:
        rule = "experts are swiglu or swiglu-clamped"
        yield problem("model.mlp", f'"{model.mlp}"', rule, 'set it to "swiglu"')


def _groups(moe: Moe) -> Iterator[ConfigProblem]:
    if moe.experts % moe.groups or (moe.groups > 1 and moe.experts // moe.groups < 2):
        yield problem(
            "model.moe.groups",
            moe.groups,
            f"must divide model.moe.experts ({moe.experts}) into groups of two or more",
            f"nearest: {nearest_divisor(max(1, moe.experts // 2), moe.groups)}",
        )
        return
    if moe.top_groups > moe.groups:
        yield problem(
            "model.moe.top_groups",
            moe.top_groups,
            f"must be at most model.moe.groups ({moe.groups})",
            f"nearest: {moe.groups}",
        )
    elif moe.top_k > moe.top_groups * (moe.experts // moe.groups):
        yield problem(
            "model.moe.top_groups",
            moe.top_groups,
            f"leaves fewer than model.moe.top_k ({moe.top_k}) experts to a token",
            f"nearest: {-(-moe.top_k * moe.groups // moe.experts)}",
        )


def _positions(model: Model) -> Iterator[ConfigProblem]:
    scaling = model.rope_scaling
    if scaling is None:
        return
    lowest, highest = scaling.low_frequency_factor, scaling.high_frequency_factor
    if scaling.kind == "llama3" and lowest >= highest:
        yield problem(
            "model.rope_scaling.low_frequency_factor",
            lowest,
            f"must be below high_frequency_factor ({highest})",
            "Llama 3 uses 1.0 and 4.0",
        )
    if scaling.kind == "yarn" and scaling.slow_rotations >= scaling.fast_rotations:
        yield problem(
            "model.rope_scaling.slow_rotations",
            scaling.slow_rotations,
            f"must be below fast_rotations ({scaling.fast_rotations})",
            "YaRN uses 1.0 and 32.0",
        )


def _window(model: Model) -> Iterator[ConfigProblem]:
    if model.window is not None and model.window.full_every == 1:
        yield problem(
            "model.window.full_every",
            1,
            "leaves no layer with the window",
            'set model.window = "none", or full_every to 0 or above 1',
        )
