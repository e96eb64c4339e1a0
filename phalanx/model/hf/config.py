"""Model shapes as Hugging Face writes them in config.json, and back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import structs

from phalanx.config import LatentAttentionShape, Model, Moe, MultiTokenPrediction
from phalanx.model.hf.families import (
    ACTIVATIONS,
    FAMILIES,
    ModelFamily,
    latent_scale,
    obstacles,
)
from phalanx.model.hf.files import HfError, tensor_files
from phalanx.model.hf.layout import prediction_prefix
from phalanx.model.hf.positions import read_positions, write_positions

LATENT_KEYS = {
    "key_value_rank": "kv_lora_rank",
    "content_head_dim": "qk_nope_head_dim",
    "rope_head_dim": "qk_rope_head_dim",
    "value_head_dim": "v_head_dim",
}
SHARED_WIDTH = "shared_expert_intermediate_size"
SOFTCAPS = {
    "attn_logit_softcapping": "attention_softcap",
    "final_logit_softcapping": "logit_softcap",
}
GEMMA_SCALAR = 256  # query_pre_attn_scalar where a file leaves it out
DEFAULT_CONTEXT = 8192  # tokens; what is exported when the caller does not say


def config_from_hf(folder: Path) -> Model:
    """The shape described by a folder's config.json; what we cannot compute is refused."""
    config = read_config(folder)
    try:
        model = _model(folder, config)
        return msgspec.convert(msgspec.to_builtins(model), Model)  # what limits settings have
    except msgspec.ValidationError as error:
        limit, _, where = str(error).partition(" - at `$.")
        problem = f"config.json: model.{where.rstrip('`')} would be none of ours: {limit}"
        raise HfError(folder, problem) from error
    except (TypeError, AttributeError, ValueError) as error:
        problem = f"config.json: a value is of another kind than its layout has: {error}"
        raise HfError(folder, problem) from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder, of an architecture we know."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except OSError as error:
        raise HfError(folder, f"config.json cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise HfError(folder, f"config.json is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise HfError(folder, "config.json holds no table of settings")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported = ", ".join(FAMILIES)
        hint = ""
        if f"{model_type}_text" in FAMILIES:
            hint = f"; save its text model alone, which is of the type {model_type}_text"
        problem = (
            f"config.json: model_type = {model_type!r} is not supported ({supported} are){hint}"
        )
        raise HfError(folder, problem)
    return config


def _model(folder: Path, config: dict[str, Any]) -> Model:
    family = FAMILIES[config["model_type"]]
    _refuse_unsupported(folder, config)
    heads = _required(folder, config, "num_attention_heads")
    dim = _required(folder, config, "hidden_size")
    head_dim = config.get("head_dim") or dim // heads
    scalar = config.get("query_pre_attn_scalar", GEMMA_SCALAR) if family.any_scale else head_dim
    if not scalar > 0:
        raise HfError(folder, f"config.json: query_pre_attn_scalar = {scalar} is not above 0")
    activation = config.get("hidden_activation" if family.any_scale else "hidden_act")
    try:
        positions = read_positions(config)
    except ValueError as error:
        raise HfError(folder, f"config.json: {error}") from error
    model = Model(
        dim=dim,
        layers=_required(folder, config, "num_hidden_layers"),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        ffn=_required(folder, config, "intermediate_size"),
        vocab=_required(folder, config, "vocab_size"),
        norm_eps=config.get("rms_norm_eps", family.eps),
        attention_scale=0.0 if scalar == head_dim else scalar**-0.5,
        embedding_scale=math.sqrt(dim) if family.scaled_embedding else 1.0,
        **_read_softcaps(config, family),
        tied_embedding=config.get("tie_word_embeddings", family.tied),
        moe=_moe(folder, config) if family.moe else None,
        **positions,
        **{"mlp": ACTIVATIONS[activation or family.activation], **family.has},
    )
    return with_latent(folder, config, model) if family.latent else model


def _read_softcaps(config: dict[str, Any], family: ModelFamily) -> dict[str, Any]:
    """Ours of those that a layout has; null is none."""
    return {
        SOFTCAPS[key]: float(config.get(key, default) or 0.0)
        for key, default in family.softcaps.items()
    }


def with_latent(folder: Path, config: dict[str, Any], model: Model) -> Model:
    """DeepSeek's attention and experts in place of those that every layout has."""
    key = {ours: _required(folder, config, theirs) for ours, theirs in LATENT_KEYS.items()}
    model = structs.replace(
        model,
        kv_heads=model.heads,
        head_dim=key["content_head_dim"] + key["rope_head_dim"],
        latent=LatentAttentionShape(query_rank=config.get("q_lora_rank") or 0, **key),
    )
    model = structs.replace(model, mtp=_mtp(folder, config, model))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scales = (rope.get("mscale", 0), rope.get("mscale_all_dim", 0))
    if model.rope_scaling is None or scales == (0, 0):
        return model
    if scales != (1, 1) or model.rope_scaling.kind != "yarn":
        problem = f"config.json: mscale and mscale_all_dim of {scales} are not supported, only 1.0"
        raise HfError(folder, problem)
    return structs.replace(model, attention_scale=latent_scale(model))


def _mtp(folder: Path, config: dict[str, Any], model: Model) -> MultiTokenPrediction | None:
    """What predicts tokens further on; transformers counts it and leaves it out of the weights."""
    layers = config.get("num_nextn_predict_layers", config.get("num_mtp_layers")) or 0
    if not layers:
        return None
    try:
        stored = f"{prediction_prefix(model, 0)}eh_proj.weight" in tensor_files(folder)
    except HfError:
        stored = True  # a shape without weights
    return MultiTokenPrediction(layers=layers) if stored else None


def _refuse_unsupported(folder: Path, config: dict[str, Any]) -> None:
    family = FAMILIES[config["model_type"]]
    moe = family.moe
    activations = ("silu",) if moe else (None, *ACTIVATIONS)
    only: dict[str, tuple[Any, ...]] = {
        "hidden_act": activations,
        "hidden_activation": activations,
        "attention_bias": (family.has.get("attention_out_bias", False),),
        "swiglu_limit": (7.0,),
        "swiglu_alpha": (1.702,),
        "mlp_bias": (False,),
        "qkv_bias": (True,),
        "partial_rotary_factor": (1.0,),
        "decoder_sparse_step": (1,),
        "use_sliding_window": (False, None),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
        "is_causal": (True,),
        "rope_interleave": (True,),
    }
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        rule = f"weights in {method or 'quantised'} form are not read"
        fix = "save them in 16 bits (transformers: from_pretrained with dequantize, then save)"
        raise HfError(folder, f"config.json: quantization_config: {rule}; {fix}")
    for key, supported in only.items():
        if key not in family.softcaps and config.get(key, supported[0]) not in supported:
            those = " or ".join(repr(value) for value in supported if value is not None) or "null"
            problem = f"config.json: {key} = {config[key]!r} is not supported, only {those}"
            raise HfError(folder, problem)


def _moe(folder: Path, config: dict[str, Any]) -> Moe:
    family = FAMILIES[config["model_type"]]
    dense = sorted(config.get("mlp_only_layers") or [])
    if dense != list(range(len(dense))):
        problem = f"config.json: mlp_only_layers = {dense}: dense layers must come first"
        raise HfError(folder, problem)
    if family.latent:
        return _deepseek_moe(folder, config)
    experts = "num_local_experts" if "num_local_experts" in config else "num_experts"
    width = "intermediate_size" if family.one_ffn else "moe_intermediate_size"
    top_k = _required(folder, config, "num_experts_per_tok")
    layers = _required(folder, config, "num_hidden_layers") - len(dense)
    theirs = config.get("router_aux_loss_coef", 0.001)
    return Moe(
        experts=_required(folder, config, experts),
        top_k=top_k,
        ffn=_required(folder, config, width),
        first_dense_layers=len(dense),
        normalize_top_k=family.one_ffn or config.get("norm_topk_prob", False),
        auxiliary_coefficient=_rounded(theirs * top_k / max(1, layers)),
        biases=family.expert_biases,
        shared_experts=int(family.shared_gate),
        shared_ffn=_required(folder, config, SHARED_WIDTH) if family.shared_gate else 0,
        shared_gate=family.shared_gate,
    )


def _rounded(coefficient: float) -> float:
    """Of a balance loss, as it is written: there and back again it is the same.

    Theirs counts each of a token's experts, and is the mean over layers; in ours experts share a
    token, and each layer adds its own: ours is theirs times experts of a token, by layers.
    """
    return float(f"{coefficient:.12g}")


def _deepseek_moe(folder: Path, config: dict[str, Any]) -> Moe:
    shared = _required(folder, config, "n_shared_experts", least=0)
    ffn = _required(folder, config, "moe_intermediate_size")
    return Moe(
        experts=_required(folder, config, "n_routed_experts"),
        top_k=_required(folder, config, "num_experts_per_tok"),
        ffn=ffn,
        shared_experts=shared,
        shared_ffn=shared * ffn,
        first_dense_layers=_required(folder, config, "first_k_dense_replace", least=0),
        score="sigmoid",
        normalize_top_k=config.get("norm_topk_prob", True),
        route_scale=config.get("routed_scaling_factor", 2.5),
        balance="bias",
        groups=_required(folder, config, "n_group"),
        top_groups=_required(folder, config, "topk_group"),
    )


def _required(folder: Path, config: dict[str, Any], key: str, least: int = 1) -> int:
    value = config.get(key)
    if value is None:
        raise HfError(folder, f"config.json has no {key}")
    if type(value) is not int or value < least:
        problem = f"config.json: {key} = {value!r} is no whole number of at least {least}"
        raise HfError(folder, problem)
    return value


def kind_of(model: Model) -> str:
    """Which of the known architectures expresses this model exactly."""
    if model.module:
        raise HfError(None, f'model.module = "{model.module}": no published layout is that of it')
    moe = model.moe
    problems_of = {model_type: obstacles(model, family) for model_type, family in FAMILIES.items()}
    sparse = moe is not None
    model_type = min(
        problems_of, key=lambda each: (FAMILIES[each].moe != sparse, len(problems_of[each]))
    )
    if problems_of[model_type]:
        settings, architectures = " and ".join(problems_of[model_type]), ", ".join(FAMILIES)
        raise HfError(None, f"{settings}: has no place in the layouts {architectures}")
    unlike = moe is not None and (not moe.normalize_top_k or moe.first_dense_layers)
    if FAMILIES[model_type].one_ffn and unlike:
        rule = f"needs model.qk_norm = true (qwen3_moe): {model_type} cannot express it"
        raise HfError(None, f"model.moe.normalize_top_k = false or first_dense_layers > 0 {rule}")
    return model_type


def config_to_hf(model: Model, dtype: torch.dtype, context: int = 0) -> dict[str, Any]:
    """The content of config.json for a resolved model, for transformers 4 and 5."""
    family_name = kind_of(model)
    family, moe = FAMILIES[family_name], model.moe
    activation = next((name for name, mlp in ACTIVATIONS.items() if mlp == model.mlp), "silu")
    if model.rope_scaling is not None:
        context = context or int(model.rope_scaling.factor * model.rope_scaling.original_context)
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family_name,
        "hidden_size": model.dim,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": moe.ffn if moe and family.one_ffn else model.ffn,
        "vocab_size": model.vocab,
        "max_position_embeddings": context or DEFAULT_CONTEXT,
        "hidden_activation" if family.any_scale else "hidden_act": activation,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_embedding,
        "attention_bias": model.attention_out_bias,
        **write_positions(model, family),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if family.nope:
        config["pad_token_id"] = (
            None  # theirs is of the published vocabulary, maybe beyond this one
        )
    if family.any_scale:
        config["query_pre_attn_scalar"] = _scalar(model)
    for key in family.softcaps:
        config[key] = getattr(model, SOFTCAPS[key]) or None
    if moe is not None and model.latent is not None:
        config |= _deepseek_keys(model.latent, moe)
        config["num_nextn_predict_layers"] = model.mtp.layers if model.mtp is not None else 0
        del config["head_dim"]  # theirs is the width that RoPE rotates
        if model.attention_scale:
            config["rope_parameters"] |= {"mscale": 1.0, "mscale_all_dim": 1.0}
            config["rope_scaling"] |= {"mscale": 1.0, "mscale_all_dim": 1.0}
        return config
    if moe is not None:
        config["num_experts_per_tok"] = moe.top_k
        sparse = model.layers - moe.first_dense_layers
        config["router_aux_loss_coef"] = _rounded(moe.auxiliary_coefficient * sparse / moe.top_k)
        config["num_local_experts" if family.one_ffn else "num_experts"] = moe.experts
    if moe is not None and family.shared_gate:
        config[SHARED_WIDTH] = moe.shared_ffn
    if moe is not None and family_name in ("qwen2_moe", "qwen3_moe"):
        config["moe_intermediate_size"] = moe.ffn
        config["norm_topk_prob"] = moe.normalize_top_k
        config["mlp_only_layers"] = list(range(moe.first_dense_layers))
        config["decoder_sparse_step"] = 1
    return config


def _scalar(model: Model) -> int:
    """The whole number whose inverse root is the scale of attention's scores."""
    if not model.attention_scale:
        return model.head_dim
    scalar = round(model.attention_scale**-2)
    if scalar < 1 or scalar**-0.5 != model.attention_scale:
        rule = "must be the inverse root of a whole number to be written as query_pre_attn_scalar"
        raise HfError(None, f"model.attention_scale = {model.attention_scale} {rule}")
    return scalar


def _deepseek_keys(latent: LatentAttentionShape, moe: Moe) -> dict[str, Any]:
    return {
        **{theirs: getattr(latent, ours) for ours, theirs in LATENT_KEYS.items()},
        "q_lora_rank": latent.query_rank or None,
        "rope_interleave": True,
        "n_routed_experts": moe.experts,
        "n_shared_experts": moe.shared_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn,
        "first_k_dense_replace": moe.first_dense_layers,
        "norm_topk_prob": moe.normalize_top_k,
        "routed_scaling_factor": moe.route_scale,
        "n_group": moe.groups,
        "topk_group": moe.top_groups,
    }
