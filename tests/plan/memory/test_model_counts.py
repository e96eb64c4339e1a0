"""Counts: published totals, closed forms, and agreement with the model that is built."""

from __future__ import annotations

import pytest
import torch

from phalanx.config import PRESETS, LatentAttention, Model, Moe, resolve_model
from phalanx.model import Transformer
from phalanx.plan import flops_per_token, parameters

# Published or closed-form figures, in billions.
TOTALS = {
    "llama3-1b": (1.498, 1.498),  # 1.236 published, plus the head that is untied here
    "llama3-3b": (3.607, 3.607),  # 3.213 published, plus the untied head
    "llama3-8b": (8.030, 8.030),
    "llama3-70b": (70.554, 70.554),
    "llama3-405b": (405.853, 405.853),
    # 174.6 published: here plus an untied head, less biases and learned positions
    "gpt3-175b": (175.185, 175.185),
    "mixtral-8x7b": (46.703, 12.880),
    "qwen3-moe-30b-a3b": (30.532, 3.353),
    "deepseek-v3": (671.026, 37.552),
    "dense-1t": (1006.495, 1006.495),
}


@pytest.mark.parametrize("preset", TOTALS)
def test_presets_have_their_known_sizes(preset: str) -> None:
    count = parameters(PRESETS[preset])
    assert (round(count.total / 1e9, 3), round(count.active / 1e9, 3)) == TOTALS[preset]


def test_llama3_8b_to_the_last_parameter() -> None:
    assert parameters(PRESETS["llama3-8b"]).total == 8_030_261_248


VARIANTS = {
    "dense": Model(preset="tiny"),
    "tied": Model(preset="tiny", tied_embedding=True),
    "qk-norm": Model(preset="tiny", qk_norm=True),
    "gelu": Model(preset="tiny", mlp="gelu"),
    "wide-heads": Model(preset="tiny", head_dim=32),
    "moe": Model(preset="tiny-moe"),
    "moe-shared": Model(
        preset="tiny",
        moe=Moe(experts=4, top_k=2, ffn=64, shared_experts=2, first_dense_layers=1),
    ),
    "latent": Model(
        preset="tiny",
        kv_heads=8,
        latent=LatentAttention(
            query_rank=48,
            key_value_rank=32,
            content_head_dim=16,
            rope_head_dim=8,
            value_head_dim=12,
        ),
    ),
    "latent-full-rank": Model(
        preset="tiny",
        kv_heads=8,
        latent=LatentAttention(
            query_rank=0, key_value_rank=32, content_head_dim=16, rope_head_dim=8, value_head_dim=12
        ),
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_counts_equal_the_model_that_is_built(name: str) -> None:
    with torch.device("meta"):
        built = Transformer(resolve_model(VARIANTS[name]))
    assert parameters(VARIANTS[name]).total == sum(p.numel() for p in built.parameters())


def test_layers_embedding_and_head_add_up_to_the_total() -> None:
    count = parameters(PRESETS["deepseek-v3"])
    assert len(count.per_layer) == 61
    assert count.per_layer[2] < count.per_layer[3]  # three dense layers come first
    parts = count.embedding + count.head + count.final_norm + sum(count.per_layer)
    assert parts == count.total


def test_a_tied_head_counts_no_parameters_but_its_flops() -> None:
    tied, untied = VARIANTS["tied"], VARIANTS["dense"]
    assert parameters(tied).head == 0
    assert flops_per_token(tied, 128) == flops_per_token(untied, 128)


def test_flops_are_six_per_weight_plus_attention() -> None:
    model = PRESETS["llama3-8b"]
    count = parameters(model)
    norms = 2 * model.dim * model.layers + model.dim
    weights = count.total - count.embedding - norms
    scores = 12 * model.layers * model.heads * model.head_dim * 8192
    palm = flops_per_token(model, 8192, convention="palm").model_flops
    causal = flops_per_token(model, 8192, convention="causal").model_flops
    assert palm == 6 * weights + scores
    assert causal == 6 * weights + scores // 2


def test_only_visited_experts_cost_flops() -> None:
    two = Model(preset="tiny-moe")
    three = Model(preset="tiny", moe=Moe(experts=8, top_k=3, ffn=256))
    more = flops_per_token(three, 64).model_flops - flops_per_token(two, 64).model_flops
    assert more == 6 * 4 * (3 * 128 * 256)


def test_latent_attention_scores_have_their_own_widths() -> None:
    latent = VARIANTS["latent"]
    per_token_of_context = (
        flops_per_token(latent, 2, convention="palm").model_flops
        - flops_per_token(latent, 1, convention="palm").model_flops
    )
    assert per_token_of_context == 3 * 4 * 2 * 8 * (16 + 8 + 12)


def test_full_recompute_repeats_the_blocks_forward_and_not_the_head() -> None:
    model = PRESETS["llama3-1b"]
    plain = flops_per_token(model, 4096)
    full = flops_per_token(model, 4096, recompute="full")
    head = 2 * model.vocab * model.dim
    assert plain.hardware_flops == plain.model_flops == full.model_flops
    assert full.hardware_flops - full.model_flops == plain.model_flops // 3 - head


def test_selective_recompute_repeats_nothing_that_counts() -> None:
    flops = flops_per_token(PRESETS["llama3-1b"], 4096, recompute="selective")
    assert flops.hardware_flops == flops.model_flops
