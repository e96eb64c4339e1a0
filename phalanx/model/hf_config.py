"""Model shapes as Hugging Face writes them in config.json, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from phalanx.config import Model, Moe, RopeScaling

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# What transformers assumes where a file leaves the key out.
DEFAULT_ROPE_THETA = {"llama": 1e4, "mixtral": 1e6, "qwen3": 1e4, "qwen3_moe": 1e4}
DEFAULT_NORM_EPS = {"llama": 1e-6, "mixtral": 1e-5, "qwen3": 1e-6, "qwen3_moe": 1e-6}
DEFAULT_CONTEXT = 8192  # tokens; what is exported when the caller does not say


class HfError(Exception):
    """A Hugging Face folder and a Phalanx model do not fit: where, what, and the rule."""

    def __init__(self, folder: Path | None, problem: str) -> None:
        self.folder = folder
        self.problem = problem
        super().__init__(folder, problem)

    def __str__(self) -> str:
        return self.problem if self.folder is None else f"{self.folder}: {self.problem}"


def config_from_hf(folder: Path) -> Model:
    """The shape described by a folder's config.json; what we cannot compute is refused."""
    return _model(folder, read_config(folder))


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder, of an architecture we know."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except OSError as error:
        raise HfError(folder, f"config.json cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise HfError(folder, f"config.json is not JSON: {error}") from error
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise HfError(folder, f"config.json: model_type = {kind!r} is not supported ({known} are)")
    return config


def _model(folder: Path, config: dict[str, Any]) -> Model:
    kind = config["model_type"]
    _refuse_unsupported(folder, config)
    theta, scaling = _rope(folder, config)
    heads = _required(folder, config, "num_attention_heads")
    dim = _required(folder, config, "hidden_size")
    return Model(
        dim=dim,
        layers=_required(folder, config, "num_hidden_layers"),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or dim // heads,
        ffn=_required(folder, config, "intermediate_size"),
        vocab=_required(folder, config, "vocab_size"),
        norm_eps=config.get("rms_norm_eps", DEFAULT_NORM_EPS[kind]),
        rope_theta=theta,
        rope_scaling=scaling,
        qk_norm=kind.startswith("qwen3"),
        tied_embedding=config.get("tie_word_embeddings", False),
        moe=_moe(folder, config) if kind in ("mixtral", "qwen3_moe") else None,
    )


def _refuse_unsupported(folder: Path, config: dict[str, Any]) -> None:
    only = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": 1.0,
        "decoder_sparse_step": 1,
        "quantization_config": None,
        "use_sliding_window": False,
    }
    if config["model_type"] == "mixtral":  # elsewhere use_sliding_window decides
        only["sliding_window"] = None
    for key, supported in only.items():
        if config.get(key, supported) != supported:
            problem = f"config.json: {key} = {config[key]!r} is not supported, only {supported!r}"
            raise HfError(folder, problem)


def _rope(folder: Path, config: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base frequency and scaling, from the key of transformers 5 or the older two."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    default = config.get("rope_theta", DEFAULT_ROPE_THETA[config["model_type"]])
    theta = float(rope.get("rope_theta", default))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        problem = f"config.json: RoPE scaling of type {kind!r} is not supported, only 'llama3'"
        raise HfError(folder, problem)
    return theta, RopeScaling(
        factor=float(_required(folder, rope, "factor")),
        low_frequency_factor=float(_required(folder, rope, "low_freq_factor")),
        high_frequency_factor=float(_required(folder, rope, "high_freq_factor")),
        original_context=_required(folder, rope, "original_max_position_embeddings"),
    )


def _moe(folder: Path, config: dict[str, Any]) -> Moe:
    mixtral = config["model_type"] == "mixtral"
    dense = sorted(config.get("mlp_only_layers") or [])
    if dense != list(range(len(dense))):
        problem = f"config.json: mlp_only_layers = {dense}: dense layers must come first"
        raise HfError(folder, problem)
    experts = "num_local_experts" if "num_local_experts" in config else "num_experts"
    return Moe(
        experts=_required(folder, config, experts),
        top_k=_required(folder, config, "num_experts_per_tok"),
        ffn=_required(folder, config, "intermediate_size" if mixtral else "moe_intermediate_size"),
        first_dense_layers=len(dense),
        normalize_top_k=mixtral or config.get("norm_topk_prob", False),
        auxiliary_coefficient=config.get("router_aux_loss_coef", 0.001),
    )


def _required(folder: Path, config: dict[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise HfError(folder, f"config.json has no {key}")
    return config[key]


def kind_of(model: Model) -> str:
    """Which of the known architectures expresses this model exactly."""
    moe = model.moe
    obstacles = {
        "model.mlp = 'gelu'": model.mlp != "swiglu",
        "model.latent": model.latent is not None,
        "model.moe.shared_experts": moe is not None and bool(moe.shared_experts or moe.shared_ffn),
        "model.moe.score = 'sigmoid'": moe is not None and moe.score != "softmax",
        "model.moe.route_scale": moe is not None and moe.route_scale != 1.0,
        "model.moe.balance = 'bias'": moe is not None and moe.balance == "bias",
    }
    for setting, present in obstacles.items():
        if present:
            known = ", ".join(ARCHITECTURES)
            raise HfError(None, f"{setting} has no place in the layouts {known}")
    if moe is None:
        return "qwen3" if model.qk_norm else "llama"
    if model.qk_norm:
        return "qwen3_moe"
    if not moe.normalize_top_k or moe.first_dense_layers:
        rule = "needs model.qk_norm = true (qwen3_moe): mixtral cannot express it"
        raise HfError(None, f"model.moe.normalize_top_k = false or first_dense_layers > 0 {rule}")
    return "mixtral"


def config_to_hf(model: Model, dtype: torch.dtype, context: int = 0) -> dict[str, Any]:
    """The content of config.json for a resolved model, for transformers 4 and 5."""
    kind = kind_of(model)
    moe, scaling = model.moe, model.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
        context = context or int(scaling.factor * scaling.original_context)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_size": model.dim,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": moe.ffn if moe and kind == "mixtral" else model.ffn,
        "vocab_size": model.vocab,
        "max_position_embeddings": context or DEFAULT_CONTEXT,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_embedding,
        "attention_bias": False,
        "rope_parameters": {**rope, "rope_theta": model.rope_theta},
        "rope_theta": model.rope_theta,
        "rope_scaling": rope if scaling is not None else None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if moe is not None:
        config["num_experts_per_tok"] = moe.top_k
        config["router_aux_loss_coef"] = moe.auxiliary_coefficient
        config["num_local_experts" if kind == "mixtral" else "num_experts"] = moe.experts
    if moe is not None and kind == "qwen3_moe":
        config["moe_intermediate_size"] = moe.ffn
        config["norm_topk_prob"] = moe.normalize_top_k
        config["mlp_only_layers"] = list(range(moe.first_dense_layers))
        config["decoder_sparse_step"] = 1
    return config
