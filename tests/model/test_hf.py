"""Hugging Face folders against transformers itself, with small random models."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.config import PRESETS, Model, Moe, MultiTokenPrediction, RopeScaling
from phalanx.model import ForwardContext, Router, Transformer
from phalanx.model.hf import HfError, config_from_hf, export_hf, load_hf
from phalanx.model.hf.config import config_to_hf
from tests.model.small_models import plain_context

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 32}
QWEN2_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
    "mlp_only_layers": [0],
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_FACTORS = {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}
LOCAL = {"rope_type": "default", "rope_theta": 10_000.0}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
GEMMA = {
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
GPT_OSS = {
    **MIXTRAL,
    "head_dim": 32,
    "sliding_window": 8,
    "rope_parameters": {**YARN_ROPE, "truncate": False},
}
SOFTCAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}
DEEPSEEK = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "num_mtp_layers": 0,
}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}  # the others are called like their model
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-one-kv-head-a-query": ("Llama", {"num_key_value_heads": 4}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR_ROPE}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN_ROPE}),
    "llama-yarn-factors": ("Llama", {"rope_parameters": {**YARN_ROPE, **YARN_FACTORS}}),
    "llama-geglu": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-geglu-exact": ("Llama", {"hidden_act": "gelu"}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "mistral-no-window": ("Mistral", {"sliding_window": None}),
    "mixtral": ("Mixtral", MIXTRAL),
    "mixtral-window": ("Mixtral", {**MIXTRAL, "sliding_window": 8}),
    "gpt-oss": ("GptOss", GPT_OSS),
    "gpt-oss-plain-rope": (
        "GptOss",
        {**GPT_OSS, "num_hidden_layers": 3, "rope_parameters": LOCAL},
    ),
    "qwen2": ("Qwen2", {}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "pad_token_id": None}),
    "smollm3-other-pattern": ("SmolLM3", {"no_rope_layers": [1, 0], "pad_token_id": None}),
    "gemma2": ("Gemma2", {**GEMMA, **SOFTCAPS}),
    "gemma2-uncapped-pattern": (
        "Gemma2",
        {
            "num_hidden_layers": 5,
            "head_dim": 16,
            "sliding_window": 8,
            "attn_logit_softcapping": None,
            "rope_parameters": {**LINEAR_ROPE, "rope_theta": 1e4},
        },
    ),
    "gemma3": ("Gemma3", GEMMA),
    "gemma3-five-to-one": ("Gemma3", {"sliding_window": 8, "num_hidden_layers": 7, "head_dim": 16}),
    "gemma3-scaled-beyond-the-window": (
        "Gemma3",
        {**GEMMA, "rope_parameters": {"full_attention": LINEAR_ROPE, "sliding_attention": LOCAL}},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 8, "num_hidden_layers": 5}),
    "olmo3-yarn": (
        "Olmo3",
        {
            "sliding_window": 8,
            "num_hidden_layers": 4,
            "rope_parameters": {"full_attention": YARN_ROPE, "sliding_attention": LOCAL},
        },
    ),
    "deepseek-v3": ("DeepseekV3", DEEPSEEK),
    "deepseek-v3-full-rank": (
        "DeepseekV3",
        {**DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    ),
    "deepseek-v3-yarn": (
        "DeepseekV3",
        {**DEEPSEEK, "rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "qwen2-moe": ("Qwen2Moe", QWEN2_MOE),
    "qwen2-moe-normalised": ("Qwen2Moe", {**QWEN2_MOE, "norm_topk_prob": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-moe": ("Qwen3Moe", {**QWEN_MOE, "norm_topk_prob": True}),
    "qwen3-moe-unnormalised": ("Qwen3Moe", {**QWEN_MOE, "norm_topk_prob": False}),
    "qwen3-moe-first-layer-dense": ("Qwen3Moe", {**QWEN_MOE, "mlp_only_layers": [0]}),
}


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


def theirs(case: str, seed: int = 0) -> Any:
    """A random transformers model whose norms and routers are not at their neutral start."""
    name, changes = CASES[case]
    torch.manual_seed(seed)
    config = getattr(transformers, CONFIGS.get(name, f"{name}Config"))(**{**SMALL, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    return randomized(model, "e_score_correction_bias")


@torch.no_grad()
def randomized(model: Any, bias: str) -> Any:
    for parameter in model.parameters():
        parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.1)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith(bias):
            buffer.normal_(0.0, 0.1)
    return model


def saved(case: str, folder: Path, **options: Any) -> Path:
    theirs(case).save_pretrained(folder, **options)
    return folder


def ours(config: Model, state: dict[str, torch.Tensor]) -> Transformer:
    model = Transformer(config).eval()
    absent, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and all(key.endswith("expert_bias") for key in absent)
    model.prepare(torch.arange(TOKENS.shape[1]))
    return model


def tokens() -> torch.Tensor:
    return torch.randint(128, (2, 48), generator=torch.Generator().manual_seed(1))


TOKENS = tokens()


@torch.no_grad()
def logits_of_theirs(model: Any) -> torch.Tensor:
    out: torch.Tensor = model(TOKENS).logits
    return out


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.std() > 0.1  # otherwise closeness would say nothing
    return float((a - b).abs().max())


@pytest.mark.parametrize("case", CASES)
def test_imported_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    folder = saved(case, tmp_path)
    model = ours(config_from_hf(folder), dict(load_hf(folder)))
    with torch.no_grad():
        assert difference(logits_of_theirs(theirs(case)), model(TOKENS)) < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_exported_logits_equal_ours_and_transformers_misses_nothing(
    case: str, tmp_path: Path
) -> None:
    assert_exported(config_from_hf(saved(case, tmp_path / "source")), tmp_path / "out")


@pytest.mark.parametrize("case", ["gemma2", "gemma3", "gpt-oss"])
def test_a_model_whose_layout_has_windows_is_exported_without_any(
    case: str, tmp_path: Path
) -> None:
    """Theirs makes a mask of windows whether a layer takes it or not."""
    config = config_from_hf(saved(case, tmp_path / "source"))
    assert config.window is not None
    config = msgspec.structs.replace(config, window=None)
    assert_exported(config, tmp_path / "out")
    assert config_from_hf(tmp_path / "out") == config


def assert_exported(config: Model, folder: Path) -> None:
    """What is written is all that transformers asks for, and it computes the same."""
    torch.manual_seed(7)
    model = randomized(Transformer(config).eval(), "expert_bias")
    model.prepare(torch.arange(TOKENS.shape[1]))
    export_hf(model.state_dict(), config, folder, torch.float32)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        assert difference(model(TOKENS), logits_of_theirs(loaded.eval())) < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_a_round_trip_changes_neither_bit_nor_shape(case: str, tmp_path: Path) -> None:
    source = saved(case, tmp_path / "source")
    config = config_from_hf(source)
    export_hf(dict(load_hf(source)), config, tmp_path / "back", torch.float32)
    assert config_from_hf(tmp_path / "back") == config
    before, after = (load_file(f / "model.safetensors") for f in (source, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def predicting(folder: Path, layers: int) -> tuple[Transformer, Model]:
    """A DeepSeek-V3 that predicts tokens further on, exported to a folder."""
    config = config_from_hf(saved("deepseek-v3", folder / "source"))
    config = msgspec.structs.replace(config, mtp=MultiTokenPrediction(layers=layers))
    torch.manual_seed(7)
    model = randomized(Transformer(config).eval(), "expert_bias")
    model.prepare(torch.arange(TOKENS.shape[1]))
    export_hf(model.state_dict(), config, folder / "out", torch.float32)
    return model, config


def test_layers_that_predict_further_on_are_read_as_they_were_written(tmp_path: Path) -> None:
    model, config = predicting(tmp_path, 2)
    assert config_from_hf(tmp_path / "out") == msgspec.structs.replace(
        config, mtp=MultiTokenPrediction(layers=2)
    )
    state, again = model.state_dict(), dict(load_hf(tmp_path / "out"))
    assert again.keys() == state.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in again.items())
    stored = load_file(tmp_path / "out" / "model.safetensors")
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    for copy, original in copies.items():
        for layer in (3, 4):
            copied = stored[f"model.layers.{layer}.{copy}.weight"]
            assert torch.equal(copied, stored[f"{original}.weight"])


def test_transformers_predicts_further_on_as_we_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.modeling_layers import MtpModel  # not in older ones

    model, _ = predicting(tmp_path, 1)
    main = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "out").eval()
    # It looks for the number of layers that the published model has.
    monkeypatch.setattr(main, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.3\."])
    ahead = MtpModel.from_pretrained(main).eval()
    with torch.no_grad():
        states = main.model(TOKENS).last_hidden_state[:, :-1]
        positions = torch.arange(1, TOKENS.shape[1])[None]
        found = ahead.forward_layer(0, states, positions, None, input_ids=TOKENS[:, 1:])
        theirs = ahead.shared_head(found)
        context = plain_context(model)
        x = model.embed(TOKENS)  # type: ignore[misc]
        for layer in list(model.layers.values())[:3]:
            x = layer(x, context)
        normed = model.norm(x)  # type: ignore[misc]
        ((state, _),) = model.states_ahead(normed, TOKENS, TOKENS, None, context)
        assert difference(theirs, model.head.logits(state)[:, :-1]) < 1e-4  # type: ignore[union-attr]


def test_a_folder_without_the_layers_that_its_config_counts_has_none(tmp_path: Path) -> None:
    folder = saved("deepseek-v3", tmp_path)
    edit_config(folder, num_nextn_predict_layers=1)
    assert config_from_hf(folder).mtp is None
    assert list(load_hf(folder))


def test_contiguous_slices_of_fused_rows_hold_whole_heads_and_matching_gates(
    tmp_path: Path,
) -> None:
    """The layout that tensor parallelism relies on, spelled out element by element."""
    folder = saved("llama", tmp_path)
    stored, state = load_file(folder / "model.safetensors"), dict(load_hf(folder))
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    queries = stored[attention + "q_proj.weight"].split(16)
    keys = stored[attention + "k_proj.weight"].split(16)
    values = stored[attention + "v_proj.weight"].split(16)
    second_half = torch.cat([queries[2], queries[3], keys[1], values[1]])
    assert torch.equal(state["layers.0.attention.qkv.weight"][64:], second_half)
    gates, ups = (stored[f"{mlp}{name}_proj.weight"].split(24) for name in ("gate", "up"))
    quarter = torch.cat([gates[3], ups[3]])  # 96 = 4 groups of 24
    assert torch.equal(state["layers.0.mlp.gate_up.weight"][144:], quarter)


@pytest.mark.parametrize("case", ["mixtral", "qwen3-moe"])
def test_stacked_experts_are_read_too(case: str, tmp_path: Path) -> None:
    apart = dict(load_hf(saved(case, tmp_path / "apart")))
    folder = saved(case, tmp_path / "stacked", save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(folder / "model.safetensors")
    for fqn, tensor in load_hf(folder):
        assert torch.equal(tensor, apart[fqn]), fqn


def test_export_in_several_files_keeps_the_limit_and_loads(tmp_path: Path) -> None:
    source = saved("mixtral", tmp_path / "source")
    state, config = dict(load_hf(source)), config_from_hf(source)
    export_hf(state, config, tmp_path / "out", torch.float32, max_shard_bytes=100_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    payloads = [sum(t.nbytes for t in load_file(file).values()) for file in files]
    assert max(payloads) <= 100_000
    again = dict(load_hf(tmp_path / "out"))
    assert again.keys() == state.keys()
    assert all(torch.equal(again[fqn], state[fqn]) for fqn in state)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits_of_theirs(model), logits_of_theirs(theirs("mixtral")))


def test_only_the_named_tensors_are_read(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    wanted = {"norm.weight", "layers.1.mlp.down.weight"}
    assert {fqn for fqn, _ in load_hf(folder, wanted)} == wanted


def test_export_rounds_to_the_asked_type(tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "source")
    state, config = dict(load_hf(source)), config_from_hf(source)
    export_hf(state, config, tmp_path / "out", torch.bfloat16)
    stored = dict(load_hf(tmp_path / "out"))
    assert all(torch.equal(stored[fqn], state[fqn].bfloat16()) for fqn in state)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_round_trip_of_16_bits_changes_none(tmp_path: Path) -> None:
    theirs("gpt-oss").bfloat16().save_pretrained(tmp_path / "source")
    config, state = config_from_hf(tmp_path / "source"), dict(load_hf(tmp_path / "source"))
    export_hf(state, config, tmp_path / "out", torch.bfloat16)
    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("source", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(tensor.dtype == torch.bfloat16 for tensor in after.values())


def test_the_tied_head_comes_from_the_embedding(tmp_path: Path) -> None:
    folder = saved("llama-tied", tmp_path / "source")
    state, config = dict(load_hf(folder)), config_from_hf(folder)
    assert torch.equal(state["head.weight"], state["embed.weight"])
    state["head.weight"] = state["head.weight"] + 1
    with pytest.raises(HfError, match=r"head\.weight differs from embed\.weight"):
        export_hf(state, config, tmp_path / "out")


def test_rope_settings_of_older_transformers_are_read(tmp_path: Path) -> None:
    folder = saved("llama3-rope", tmp_path)
    new = config_from_hf(folder)
    edit_config(folder, rope_parameters=None, rope_theta=10_000.0, rope_scaling=LLAMA3_ROPE)
    assert config_from_hf(folder) == new and new.rope_scaling is not None


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, r"model_type = 'gpt2' is not supported"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "RoPE scaling of type 'longrope'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary positions have no factor"),
        ({"model_type": "gemma3"}, "save its text model alone.*gemma3_text"),
        ({"model_type": "mixtral", "hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        (
            {"model_type": "olmo3", "sliding_window": 8, "layer_types": ["chunked"] * 2},
            "layer_types names chunked",
        ),
        (
            {
                "model_type": "olmo3",
                "sliding_window": 8,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "layer_types follows no pattern",
        ),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"vocab_size": None}, "has no vocab_size"),
        ({"model_type": ["llama"]}, r"model_type = \['llama'\] is not supported"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers = 2.5 is no whole number of at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0 is no whole number"),
        ({"hidden_size": "big"}, "hidden_size = 'big' is no whole number"),
        ({"rms_norm_eps": float("nan")}, r"model\.norm_eps would be none of ours: .*> 0"),
        ({"num_key_value_heads": "two"}, r"model\.kv_heads would be none of ours: .*`int`"),
        ({"rope_parameters": [10_000]}, "a value is of another kind than its layout has"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "in mxfp4 form.*save them in 16 bits"),
        ({"model_type": "gpt_oss", "attention_bias": False}, "attention_bias = False"),
        (
            {"model_type": "gpt_oss", "attention_bias": True, "swiglu_limit": 5.0},
            "swiglu_limit = 5.0",
        ),
    ],
)
def test_a_model_we_cannot_compute_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = saved("llama", tmp_path)
    edit_config(folder, **changes)
    with pytest.raises(HfError, match=message) as caught:
        config_from_hf(folder)
    assert str(folder) in str(caught.value)


def test_missing_misshapen_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    good = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"

    def load_with(tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / "model.safetensors")
        list(load_hf(folder))

    with pytest.raises(HfError, match=rf"{name} is missing \(for layers\.1\.attention\.qkv"):
        load_with({key: tensor for key, tensor in good.items() if key != name})
    with pytest.raises(HfError, match=rf"{name} has the shape \(16, 64\).*implies \(32, 64\)"):
        load_with({**good, name: torch.zeros(16, 64)})
    with pytest.raises(HfError, match=f"{name} is of int8: weights in quantised form"):
        load_with({**good, name: good[name].to(torch.int8)})
    bias = "model.layers.0.self_attn.q_proj.bias"
    with pytest.raises(HfError, match=f"{bias} has no place"):
        load_with({**good, bias: torch.zeros(64)})


def test_a_config_that_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(HfError, match=r"config\.json holds no table of settings"):
        config_from_hf(tmp_path)


def test_folders_without_weights_or_config_say_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(HfError, match=r"config\.json cannot be read: No such file"):
        config_from_hf(tmp_path)
    folder = saved("llama", tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(HfError, match=r"neither model\.safetensors nor"):
        list(load_hf(folder))


def test_export_refuses_what_the_layouts_cannot_express(tmp_path: Path) -> None:
    source = saved("mixtral", tmp_path / "source")
    state, config = dict(load_hf(source)), config_from_hf(source)
    moe = config.moe
    assert isinstance(moe, Moe)

    def attempt(message: str, state: dict[str, torch.Tensor] = state, **changes: Any) -> None:
        with pytest.raises(HfError, match=message):
            export_hf(state, msgspec.structs.replace(config, **changes), tmp_path / "out")

    attempt("shared_experts", moe=msgspec.structs.replace(moe, shared_experts=1))
    attempt("sigmoid", moe=msgspec.structs.replace(moe, score="sigmoid"))
    attempt("balance = 'bias'", moe=msgspec.structs.replace(moe, balance="bias"))
    attempt("mixtral cannot", moe=msgspec.structs.replace(moe, normalize_top_k=False))
    attempt("gelu", mlp="gelu")
    attempt(r"model\.nope_every", nope_every=2)
    attempt(r"model\.norm = 'post'", norm="post")
    attempt(r"model\.mtp", mtp=MultiTokenPrediction())
    yarn = RopeScaling(kind="yarn", factor=2.0, original_context=32, attention_factor=1.0)
    attempt(r"model\.attention_scale", attention_scale=0.3, rope_scaling=yarn)
    attempt(r"model\.rotary_fraction = 0\.5", rotary_fraction=0.5)
    attempt("norm.weight is missing", {k: v for k, v in state.items() if k != "norm.weight"})
    attempt(r"norm.weight has the shape \(3,\)", {**state, "norm.weight": torch.zeros(3)})
    attempt("spare is no part", {**state, "spare": torch.zeros(3)})
    assert not (tmp_path / "out").exists()


def test_export_does_not_overwrite_a_model(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    with pytest.raises(HfError, match="already holds a model"):
        export_hf(dict(load_hf(folder)), config_from_hf(folder), folder)


def test_gemma_settings_of_older_transformers_are_read(tmp_path: Path) -> None:
    folder = saved("gemma3-scaled-beyond-the-window", tmp_path)
    new = config_from_hf(folder)
    edit_config(
        folder,
        rope_parameters=None,
        rope_theta=1e6,
        rope_local_base_freq=10_000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert config_from_hf(folder) == new
    assert new.window is not None and new.window.rope_theta == 1e4 and not new.window.rope_scaled


def test_a_window_that_is_exported_is_one_that_transformers_sees(tmp_path: Path) -> None:
    """Without the window logits differ, so that equal ones say something of it."""
    folder = saved("mistral", tmp_path)
    config, state = config_from_hf(folder), dict(load_hf(folder))
    with torch.no_grad():
        near = ours(config, state)(TOKENS)
        all_of_it = ours(msgspec.structs.replace(config, window=None), state)(TOKENS)
    torch.testing.assert_close(near[:, :8], all_of_it[:, :8], rtol=1e-4, atol=1e-5)
    assert float((near - all_of_it)[:, 8:].abs().max()) > 1e-2


@pytest.mark.parametrize("dense", [0, 2])
def test_the_imported_balance_loss_pulls_as_that_of_transformers(
    dense: int, tmp_path: Path
) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    layers, theirs = 6, 0.37
    settings = {
        **SMALL,
        "model_type": "qwen3_moe",
        "num_hidden_layers": layers,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "mlp_only_layers": list(range(dense)),
        "router_aux_loss_coef": theirs,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    model = config_from_hf(tmp_path)
    assert model.moe is not None
    logits = torch.randn(1, 40, 8, generator=torch.Generator().manual_seed(3)).requires_grad_()
    rows = (logits[0],) * (layers - dense)  # alike in all layers, of which theirs takes the mean
    loss = load_balancing_loss_func(rows, num_experts=8, top_k=3)
    (expected,) = torch.autograd.grad(theirs * loss, logits)
    router = Router(8, model.moe).train()
    router.weight.data.copy_(torch.eye(8))  # its logits are what it is given
    empty = torch.empty(0)
    context = ForwardContext(empty, empty, None, None, token_weight=torch.tensor(1 / 40))
    passed, _, _ = router(logits, context)
    (one_layer,) = torch.autograd.grad(passed.sum() * 0.0, logits)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close((layers - dense) * one_layer, expected)
    assert config_to_hf(model, torch.float32)["router_aux_loss_coef"] == theirs


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("kind", "options"), [("Mixtral", MIXTRAL), ("Qwen3Moe", QWEN_MOE)])
def test_a_whole_models_balance_loss_has_the_gradients_of_transformers(
    kind: str, options: dict[str, Any], layers: int, tmp_path: Path
) -> None:
    """Theirs multiplies means over all layers; ours is the mean of what it is for each layer."""
    coefficient, experts, top_k = 0.37, 4, 2
    settings = {**SMALL, **options, "num_hidden_layers": layers}
    config = getattr(transformers, f"{kind}Config")(**settings, router_aux_loss_coef=coefficient)
    reference = randomized(
        getattr(transformers, f"{kind}ForCausalLM")(config), "score_correction_bias"
    )
    reference.save_pretrained(tmp_path)
    said = reference(TOKENS[:1], output_router_logits=True)
    modeling = importlib.import_module(type(reference).__module__)
    each = [
        modeling.load_balancing_loss_func((logits,), experts, top_k)
        for logits in said.router_logits
    ]
    if layers == 1:
        torch.testing.assert_close(each[0], said.aux_loss)
    (coefficient * torch.stack(each).mean()).backward()
    model = ours(config_from_hf(tmp_path), dict(load_hf(tmp_path))).train()
    model.token_weight.fill_(1 / TOKENS.shape[1])
    (model(TOKENS[:1]).sum() * 0.0).backward()
    assert model.embed is not None
    pairs = [(model.embed.weight, reference.get_input_embeddings().weight)]
    for number in range(layers):
        name = f"layers.{number}.moe.router.weight"
        gate = f"model.layers.{number}.mlp.gate.weight"
        pairs.append((model.get_parameter(name), reference.get_parameter(gate)))
    for found, expected in pairs:
        assert expected.grad is not None and expected.grad.abs().max() > 1e-6
        torch.testing.assert_close(found.grad, expected.grad, rtol=2e-4, atol=1e-8)


def test_presets_have_the_balance_losses_that_were_published() -> None:
    published = {"mixtral-8x7b": 0.02, "qwen2-moe-57b-a14b": 0.001, "qwen3-moe-30b-a3b": 0.001}
    for name, theirs in published.items():
        assert config_to_hf(PRESETS[name], torch.float32)["router_aux_loss_coef"] == theirs
