"""Every key of a config.json, altered, left out or added: computed as by transformers, or refused.

What is neither would be another model than its folder says, and nobody would be told.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.model.hf import HfError, config_from_hf, load_hf
from tests.model.test_hf import (
    TOKENS,
    logits_of_theirs,
    ours,
    quiet,
    saved,
    theirs,
    transformers,
)

__all__ = ["quiet"]

GONE = "it is left out"
# Of these nothing of what a model computes follows, or its shapes do, which the weights prove.
WITHOUT_EFFECT = (
    "architectures",
    "model_type",
    "transformers_version",
    "dtype",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
    "attention_dropout",
    "output_router_logits",
    "router_aux_loss_coef",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
)
LINEAR = {"type": "linear", "factor": 4.0}
PARTIAL = {"rope_theta": 50.0, "partial_rotary_factor": 0.5}
LLAMA3 = {
    **PARTIAL,
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Keys that other files of the same or of another layout have.
ADDED: list[tuple[str, Any]] = [
    ("attention_bias", True),
    ("attn_logit_softcapping", 0.5),
    ("decoder_sparse_step", 2),
    ("final_logit_softcapping", 1.0),
    ("head_dim", 8),
    ("hidden_activation", "gelu"),
    ("is_causal", False),
    ("max_position_embeddings", 8),
    ("mlp_bias", True),
    ("mlp_only_layers", [1]),
    ("no_rope_layer_interval", 2),
    ("original_max_position_embeddings", 20),
    ("partial_rotary_factor", 0.5),
    ("query_pre_attn_scalar", 9),
    ("rope_interleave", False),
    ("rope_local_base_freq", 33.0),
    ("rope_parameters", {**PARTIAL, "rope_type": "default"}),
    ("rope_parameters", LLAMA3),
    ("rope_scaling", LINEAR),
    ("rope_theta", 77.0),
    ("sliding_window", 4),
    ("sliding_window_pattern", 2),
    ("swiglu_limit", 1.0),
    ("tie_word_embeddings", True),
    ("use_bidirectional_attention", True),
    ("use_sliding_window", True),
]
FAST = ("llama", "gpt-oss")
FAMILIES = [
    pytest.param(case, marks=() if case in FAST else pytest.mark.soak)
    for case in (
        *("llama", "llama-tied", "llama3-rope", "llama-yarn-factors", "mistral", "mixtral"),
        *("qwen2", "qwen3", "smollm3", "gemma2", "gemma3", "gemma3-scaled-beyond-the-window"),
        *("olmo2", "olmo3", "olmo3-yarn", "gpt-oss", "deepseek-v3", "deepseek-v3-yarn"),
        *("qwen2-moe", "qwen3-moe"),
    )
]
KeyPath = tuple[str, ...]


def others(value: Any) -> list[Any]:
    """Values that a key might have in place of its own."""
    if value is None:
        return [True, 8, 0.5]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value, max(1, value // 2), 0]
    if isinstance(value, float):
        return [2 * value, value / 2, 0]
    kinds = ("gelu", "gelu_new", "relu", "default", "linear", "yarn", "llama3", "dynamic")
    return list(kinds) if isinstance(value, str) else []


def alterations(config: dict[str, Any], at: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in config.items():
        if key in WITHOUT_EFFECT:
            continue
        yield (*at, key), GONE
        if isinstance(value, dict):
            yield from alterations(value, (*at, key))
        for other in [None, *others(value)] if value is not None else others(value):
            if other != value:
                yield (*at, key), other


def altered(config: dict[str, Any], at: KeyPath, value: Any) -> dict[str, Any]:
    made = table = copy.deepcopy(config)
    for key in at[:-1]:
        table = table[key]
    if value is GONE:
        del table[at[-1]]
    else:
        table[at[-1]] = value
    return made


def our_logits(folder: Path) -> torch.Tensor | None:
    """None where the folder is refused."""
    try:
        model = ours(config_from_hf(folder), dict(load_hf(folder)))
    except HfError:
        return None
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS)
    return logits


def their_logits(folder: Path) -> torch.Tensor | None:
    """None where transformers does not read it, or cannot compute it."""
    try:
        return logits_of_theirs(transformers.AutoModelForCausalLM.from_pretrained(folder).eval())
    except Exception:
        return None


@pytest.mark.parametrize("case", FAMILIES)
def test_no_key_is_read_otherwise_than_by_transformers(case: str, tmp_path: Path) -> None:
    folder = saved(case, tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    added = [((key,), value) for key, value in ADDED if config.get(key, GONE) != value]
    computed, wrong = 0, []
    for at, value in (*alterations(config), *added):
        path.write_text(json.dumps(altered(config, at, value)))
        expected = their_logits(folder)
        found = our_logits(folder) if expected is not None else None
        if found is None or expected is None:
            continue
        computed += 1
        if not (found - expected).abs().max() < 1e-3:
            wrong.append(f"{'.'.join(at)} = {value}")
    assert not wrong
    assert computed > 20, "and not by refusing all of them"


def test_a_folder_whose_tied_head_is_another_matrix_is_refused(tmp_path: Path) -> None:
    """As transformers 5 does, which leaves it untied: or the head of the file would be lost."""
    folder = saved("llama", tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    with pytest.raises(HfError, match=r"lm_head\.weight is another one .* to false"):
        dict(load_hf(folder))
    model = theirs("llama")
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight.data)
    model.save_pretrained(folder)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    state = dict(load_hf(folder))
    assert torch.equal(state["head.weight"], state["embed.weight"]), "a copy is none"


def test_a_folder_that_was_written_twice_is_refused(tmp_path: Path) -> None:
    """Transformers reads the single file, whatever an index beside it says."""
    folder = saved("llama", tmp_path)
    theirs("llama", seed=1).save_pretrained(tmp_path / "apart", max_shard_size="100KB")
    for path in (tmp_path / "apart").glob("model*"):
        path.rename(folder / path.name)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    head = loaded.lm_head.weight
    assert torch.equal(head, theirs("llama").lm_head.weight), "and not that of the index"
    with pytest.raises(HfError, match="are both there, and may be two models"):
        dict(load_hf(folder))
    (folder / "model.safetensors").unlink()
    other = theirs("llama", seed=1).lm_head.weight
    assert torch.equal(dict(load_hf(folder))["head.weight"], other)


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("qwen3", {"rope_scaling": LINEAR}, "rope_scaling and rope_parameters scale .* keep one"),
        ("llama", {"is_causal": False}, "is_causal = False is not supported, only True"),
        ("gpt-oss", {"rope_parameters": None}, "neither rope_parameters nor rope_scaling"),
        ("llama-yarn", {"original_max_position_embeddings": 20}, "is 20 there and 64 in its RoPE"),
        ("gemma3", {"rope_parameters": LINEAR}, "a table for full_attention and one for sliding"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0 is not above 0"),
        ("deepseek-v3", {"topk_group": None}, "config.json has no topk_group"),
        ("llama", {"rope_parameters": {"rope_theta": 0}}, "rope_theta = 0 is not above 0"),
    ],
)
def test_what_depends_on_the_reader_is_refused_by_name(
    case: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = saved(case, tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(HfError, match=words):
        config_from_hf(folder)


def test_a_window_that_is_left_out_is_that_of_transformers(tmp_path: Path) -> None:
    for case, size in (("mistral", 4096), ("gemma2", 4096), ("gpt-oss", 128), ("olmo3", 4096)):
        folder = saved(case, tmp_path / case)
        path = folder / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(altered(config, ("sliding_window",), GONE)))
        window = config_from_hf(folder).window
        default = transformers.AutoConfig.from_pretrained(folder).sliding_window
        assert window is not None and window.size == size == default
        path.write_text(json.dumps(config | {"sliding_window": None}))
        assert config_from_hf(folder).window is None
