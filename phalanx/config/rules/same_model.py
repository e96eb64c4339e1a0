"""Whether weights of one model serve another: which settings of a model make it what it is.

A setting that is named nowhere below counts as one that changes the function, so that a new one
is compared until somebody says that it need not be.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct, structs

from phalanx.config.errors import written
from phalanx.config.resolve import has_expert_bias, resolve_model
from phalanx.config.schema import Model
from phalanx.config.section import Section

# Decide which tensors there are, or their shapes: no weights of another value fit.
SHAPE = frozenset(
    {
        "module",
        "dim",
        "layers",
        "heads",
        "kv_heads",
        "head_dim",
        "ffn",
        "vocab",
        "mlp",
        "norm",
        "qk_norm",
        "qk_norm_over",
        "attention_bias",
        "attention_out_bias",
        "attention_sinks",
        "tied_embedding",
        "latent",
        "latent.query_rank",
        "latent.key_value_rank",
        "latent.content_head_dim",
        "latent.rope_head_dim",
        "latent.value_head_dim",
        "moe",
        "moe.experts",
        "moe.ffn",
        "moe.shared_ffn",
        "moe.shared_gate",
        "moe.first_dense_layers",
        "moe.biases",
        "mtp",
        "mtp.layers",
    }
)
# The same tensors compute something else: refused unless somebody wants just that.
FUNCTION = frozenset(
    {
        "norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_scaling.factor",
        "rope_scaling.low_frequency_factor",
        "rope_scaling.high_frequency_factor",
        "rope_scaling.original_context",
        "rope_scaling.kind",
        "rope_scaling.fast_rotations",
        "rope_scaling.slow_rotations",
        "rope_scaling.round_bounds",
        "rope_scaling.attention_factor",
        "rotary_fraction",
        "nope_every",
        "window",
        "window.size",
        "window.full_every",
        "window.rope_theta",
        "window.rope_scaled",
        "norm_offset",
        "attention_scale",
        "attention_softcap",
        "logit_softcap",
        "embedding_scale",
        "residual_scale",
        "moe.top_k",
        "moe.score",
        "moe.normalize_top_k",
        "moe.route_scale",
        "moe.balance",
        "moe.groups",
        "moe.top_groups",
    }
)
# What each kind of scaling reads, beside its factor.
SCALED_BY = {
    "linear": frozenset[str](),
    "llama3": frozenset({"low_frequency_factor", "high_frequency_factor", "original_context"}),
    "yarn": frozenset(
        {"original_context", "fast_rotations", "slow_rotations", "round_bounds", "attention_factor"}
    ),
}
# Say how a model is named or trained, not what it computes.
HARMLESS = frozenset(
    {
        "preset",
        "loss",
        "moe.shared_experts",  # a resolved model says it as shared_ffn
        "moe.auxiliary_coefficient",
        "moe.bias_rate",
        "moe.z_loss_coefficient",
        "moe.auxiliary_over",
        "z_loss_coefficient",
        "qk_clip",
        "dropout",
        "width_base",
        "mtp.weight",
    }
)


class ModelDifference(Struct, frozen=True):
    """A setting in which two models differ."""

    key: str  # as in a job's file
    ours: str  # as TOML would have it
    theirs: str
    is_shape: bool  # no choice: the tensors differ


def model_differences(ours: Model, theirs: Model) -> list[ModelDifference]:
    """Every setting because of which weights of ``theirs`` are not weights of ``ours``."""
    ours, theirs = resolve_model(ours), resolve_model(theirs)
    without_effect = _without_effect(ours) & _without_effect(theirs)
    if not has_expert_bias(theirs.moe) or has_expert_bias(ours.moe):
        without_effect |= {"moe.balance"}  # it starts at zero, goes on, or is not used
    return [
        ModelDifference(f"model.{key}", _written(here), _written(there), key in SHAPE)
        for key, here, there in _compare(ours, theirs, "")
        if key not in HARMLESS and key not in without_effect
    ]


def _compare(ours: Section, theirs: Section, prefix: str) -> Iterator[tuple[str, object, object]]:
    for name in ours.__struct_fields__:
        our_value, their_value = getattr(ours, name), getattr(theirs, name)
        if isinstance(our_value, Section) and isinstance(their_value, Section):
            yield from _compare(our_value, their_value, f"{prefix}{name}.")
        elif our_value != their_value:
            yield prefix + name, our_value, their_value


def _without_effect(model: Model) -> set[str]:
    """Settings that this model has no use for."""
    keys: set[str] = set()
    if model.moe is not None and not model.moe.first_dense_layers:
        keys |= {"ffn"}  # no layer has a dense MLP
    if model.latent is not None:
        keys |= {
            "kv_heads",
            "head_dim",
            "qk_norm",
            "qk_norm_over",
        }  # the parts of a latent head decide
    if model.moe is not None and model.moe.groups == 1:
        keys |= {"moe.top_groups"}
    if model.rope_scaling is None:
        keys |= {"window.rope_scaled"}
    if (scaling := model.rope_scaling) is not None:
        used = SCALED_BY[scaling.kind]
        every = set().union(*SCALED_BY.values())
        keys |= {f"rope_scaling.{name}" for name in every if name not in used}
    return keys


def _written(value: object) -> str:
    """A setting as a job's file has it, a section in one line."""
    if not isinstance(value, Section):
        return written(value)
    inside = (f"{name} = {_written(inner)}" for name, inner in structs.asdict(value).items())
    return "{ " + ", ".join(inside) + " }"
