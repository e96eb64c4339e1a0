"""Whether weights of one model serve another: which settings of a model make it what it is.

A setting that is named nowhere below counts as one that changes the function, so that a new one
is compared until somebody says that it need not be.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct, structs

from phalanx.config.errors import written
from phalanx.config.resolve import resolve_model
from phalanx.config.schema import Model
from phalanx.config.section import Section

# Decide which tensors there are, or their shapes: no weights of another value fit.
SHAPE = frozenset(
    {
        "dim",
        "layers",
        "heads",
        "kv_heads",
        "head_dim",
        "ffn",
        "vocab",
        "mlp",
        "qk_norm",
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
        "moe.first_dense_layers",
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
        "moe.top_k",
        "moe.score",
        "moe.normalize_top_k",
        "moe.route_scale",
        "moe.balance",
    }
)
# Say how a model is named or trained, not what it computes.
HARMLESS = frozenset(
    {
        "preset",
        "moe.shared_experts",  # a resolved model says it as shared_ffn
        "moe.auxiliary_coefficient",
        "moe.bias_rate",
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
    if theirs.moe is None or theirs.moe.balance != "bias":
        without_effect |= {"moe.balance"}  # a selection bias starts at zero, or is not used
    return [
        ModelDifference(f"model.{key}", _written(here), _written(there), key in SHAPE)
        for key, here, there in _compare(ours, theirs, "")
        if key not in HARMLESS and key not in without_effect
    ]


def _compare(ours: Section, theirs: Section, prefix: str) -> Iterator[tuple[str, object, object]]:
    for name in ours.__struct_fields__:
        here, there = getattr(ours, name), getattr(theirs, name)
        if isinstance(here, Section) and isinstance(there, Section):
            yield from _compare(here, there, f"{prefix}{name}.")
        elif here != there:
            yield prefix + name, here, there


def _without_effect(model: Model) -> set[str]:
    """Settings that this model has no use for."""
    keys: set[str] = set()
    if model.moe is not None and not model.moe.first_dense_layers:
        keys |= {"ffn", "mlp"}  # no layer has a dense MLP
    if model.latent is not None:
        keys |= {"kv_heads", "head_dim", "qk_norm"}  # the parts of a latent head decide
    return keys


def _written(value: object) -> str:
    """A setting as a job's file has it, a section in one line."""
    if not isinstance(value, Section):
        return written(value)
    inside = (f"{name} = {_written(inner)}" for name, inner in structs.asdict(value).items())
    return "{ " + ", ".join(inside) + " }"
