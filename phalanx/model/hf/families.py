"""The layouts of Hugging Face as data: which of our settings each of them has, and which it may."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from phalanx.config import Model, Moe, has_expert_bias


@dataclass(frozen=True)
class ModelFamily:
    """An architecture of transformers: what it fixes, what it leaves open, what it assumes."""

    architecture: str
    theta: float = 1e4  # assumed where a file leaves the key out, like the next two
    eps: float = 1e-6
    tied: bool = False
    has: Mapping[str, Any] = field(
        default_factory=dict
    )  # settings of ours that differ from Model's
    moe: bool = False
    one_ffn: bool = False  # of experts: there are no dense layers, and chosen scores sum to one
    expert_biases: bool = False
    shared_gate: bool = False  # on a shared expert, which there is then; DeepSeek's has none
    window: Literal["none", "all", "pattern"] = "none"  # on all layers, or as layer_types says
    window_size: int = 0  # where a file leaves it out, and of the pattern:
    full_every: int = 0
    local_theta: float = 0.0  # of layers with the window, likewise; 0: theta
    scaled: bool = False  # where a file has no positions, theirs are scaled
    one_rope: bool = False  # positions are the same in layers with and without the window
    nope: bool = False
    scaled_embedding: bool = False  # by the root of the width
    any_scale: bool = False  # of attention's scores
    softcaps: Mapping[str, float] = field(default_factory=dict)  # keys that it may have, likewise
    latent: bool = False  # attention of DeepSeek, and its experts
    activation: str = "silu"
    own_head_dim: bool = True  # else always hidden_size / num_attention_heads


OLMO = {"norm": "post", "qk_norm": True, "qk_norm_over": "all"}
GEMMA = {"norm": "sandwich", "norm_offset": True, "qk_norm": True}
GPT_OSS = {
    "mlp": "swiglu-clamped",
    "attention_bias": True,
    "attention_out_bias": True,
    "attention_sinks": True,
}
# A model that several express is exported as the first of them.
FAMILIES: dict[str, ModelFamily] = {
    "llama": ModelFamily("LlamaForCausalLM"),
    "mistral": ModelFamily("MistralForCausalLM", window="all", window_size=4096),
    "qwen2": ModelFamily("Qwen2ForCausalLM", has={"attention_bias": True}),
    "qwen3": ModelFamily("Qwen3ForCausalLM", has={"qk_norm": True}),
    "smollm3": ModelFamily("SmolLM3ForCausalLM", theta=2e6, tied=True, nope=True),
    "gemma2": ModelFamily(
        "Gemma2ForCausalLM",
        tied=True,
        has={**GEMMA, "qk_norm": False},
        window="pattern",
        window_size=4096,
        full_every=2,
        one_rope=True,
        scaled_embedding=True,
        any_scale=True,
        softcaps={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        activation="gelu_pytorch_tanh",
    ),
    "gemma3_text": ModelFamily(
        "Gemma3ForCausalLM",
        theta=1e6,
        tied=True,
        has=GEMMA,
        window="pattern",
        window_size=4096,
        full_every=6,
        local_theta=1e4,
        scaled_embedding=True,
        any_scale=True,
        activation="gelu_pytorch_tanh",
    ),
    "olmo2": ModelFamily("Olmo2ForCausalLM", eps=1e-5, has=OLMO, own_head_dim=False),
    "olmo3": ModelFamily(
        "Olmo3ForCausalLM",
        theta=5e5,
        eps=1e-5,
        has=OLMO,
        window="pattern",
        window_size=4096,
        full_every=4,
        own_head_dim=False,
    ),
    "mixtral": ModelFamily(
        "MixtralForCausalLM", theta=1e6, eps=1e-5, moe=True, one_ffn=True, window="all"
    ),
    "gpt_oss": ModelFamily(
        "GptOssForCausalLM",
        theta=150_000.0,
        eps=1e-5,
        has=GPT_OSS,
        moe=True,
        one_ffn=True,
        expert_biases=True,
        scaled=True,
        window="pattern",
        window_size=128,
        full_every=2,
        one_rope=True,
    ),
    "deepseek_v3": ModelFamily("DeepseekV3ForCausalLM", moe=True, latent=True),
    "qwen2_moe": ModelFamily(
        "Qwen2MoeForCausalLM", has={"attention_bias": True}, moe=True, shared_gate=True
    ),
    "qwen3_moe": ModelFamily("Qwen3MoeForCausalLM", has={"qk_norm": True}, moe=True),
}
ACTIVATIONS: dict[str, Literal["swiglu", "geglu", "geglu-exact"]] = {
    "silu": "swiglu",
    "gelu_pytorch_tanh": "geglu",
    "gelu": "geglu-exact",
}
# Forms of a block that a layout has or has not; all else is in every one of them.
FORMS = (
    "norm",
    "norm_offset",
    "qk_norm",
    "qk_norm_over",
    "attention_bias",
    "attention_out_bias",
    "attention_sinks",
    "rotary_fraction",
    "residual_scale",
)


def obstacles(model: Model, family: ModelFamily) -> list[str]:
    """Settings of a resolved model that keep it from being of a family."""
    default = Model()
    differences = [
        f"model.{name} = {getattr(model, name)!r}"
        for name in FORMS
        if getattr(model, name) != family.has.get(name, getattr(default, name))
    ]
    window = model.window
    apart = window is not None and bool(window.rope_theta or not window.rope_scaled)
    patterned = window is not None and window.full_every > 0
    scaling = model.rope_scaling
    rounded = scaling is not None and scaling.kind == "yarn" and not scaling.round_bounds
    scale = math.sqrt(model.dim) if family.scaled_embedding else 1.0
    wrong = {
        f"model.mlp = {model.mlp!r}": not _has_mlp(model, family),
        "model.latent": (model.latent is not None) != family.latent,
        "model.mtp": model.mtp is not None and not family.latent,
        "model.window": window is not None and family.window == "none",
        "model.window's pattern": patterned and family.window == "all",
        "model.window's positions": apart and (family.window == "all" or family.one_rope),
        "model.nope_every": bool(model.nope_every) and not family.nope,
        "model.embedding_scale": model.embedding_scale != scale,
        "model.attention_scale": not _has_scale(model, family),
        "model.attention_softcap": bool(model.attention_softcap) and not family.softcaps,
        "model.logit_softcap": bool(model.logit_softcap) and not family.softcaps,
        "model.norm_eps": family.latent and model.norm_eps != family.eps,  # inner norms have that
        "model.head_dim": not family.own_head_dim and model.head_dim * model.heads != model.dim,
        "model.rope_scaling.round_bounds": rounded
        and family.window == "pattern"
        and not family.one_rope,
        "model.moe": (model.moe is not None) != family.moe,
    }
    differences += [setting for setting, present in wrong.items() if present]
    return differences + (_expert_obstacles(model.moe, family) if model.moe is not None else [])


def _has_mlp(model: Model, family: ModelFamily) -> bool:
    if family.moe:
        return bool(model.mlp == family.has.get("mlp", "swiglu"))
    return model.mlp in ACTIVATIONS.values()


def _has_scale(model: Model, family: ModelFamily) -> bool:
    if not model.attention_scale or family.any_scale:
        return True
    scaling = model.rope_scaling
    yarn = scaling is not None and scaling.kind == "yarn" and scaling.attention_factor == 1.0
    both = family.latent and model.latent is not None
    return both and yarn and model.attention_scale == latent_scale(model)


def latent_scale(model: Model) -> float:
    """What DeepSeek multiplies scores with under YaRN, in place of factors on rotated parts."""
    assert model.latent is not None and model.rope_scaling is not None
    width = model.latent.content_head_dim + model.latent.rope_head_dim
    return float(width**-0.5 * (0.1 * math.log(model.rope_scaling.factor) + 1) ** 2)


def _expert_obstacles(moe: Moe, family: ModelFamily) -> list[str]:
    shared = moe.shared_experts * moe.ffn
    if family.latent:
        wrong = {
            "model.moe.shared_ffn": not shared or moe.shared_ffn not in (0, shared),
            f"model.moe.score = {moe.score!r}": moe.score != "sigmoid",
            f"model.moe.balance = {moe.balance!r}": not has_expert_bias(moe),
        }
    else:
        wrong = {
            "model.moe.shared_experts": bool(moe.shared_experts or moe.shared_ffn)
            != family.shared_gate,
            f"model.moe.score = {moe.score!r}": moe.score != "softmax",
            "model.moe.route_scale": moe.route_scale != 1.0,
            "model.moe.groups": moe.groups > 1,
            f"model.moe.balance = {moe.balance!r}": has_expert_bias(moe),
        }
    wrong["model.moe.shared_gate"] = moe.shared_gate != family.shared_gate
    wrong["model.moe.biases"] = moe.biases != family.expert_biases
    return [setting for setting, present in wrong.items() if present]
