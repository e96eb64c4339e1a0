"""Counts: published totals, closed forms, and agreement with the model that is built."""

from __future__ import annotations

import pytest
import torch
from msgspec import structs

from phalanx.config import (
    PRESETS,
    LatentAttentionShape,
    Model,
    Moe,
    MultiTokenPrediction,
    Window,
    resolve_model,
)
from phalanx.model import Transformer
from phalanx.plan import flops_per_token, parameters
from phalanx.plan.memory.model_counts import attended_share, forward_flops_per_token

# Published or closed-form figures, in billions.
TOTALS = {
    "llama3-1b": (1.498, 1.498),  # 1.236 published, plus the head that is untied here
    "llama3-3b": (3.607, 3.607),  # 3.213 published, plus the untied head
    "llama3-8b": (8.030, 8.030),
    "llama3-70b": (70.554, 70.554),
    "llama3-405b": (405.853, 405.853),
    # 174.6 published: here plus an untied head, less biases and learned positions
    "gpt3-175b": (175.185, 175.185),
    "llama3.1-8b": (8.030, 8.030),
    "llama3.1-70b": (70.554, 70.554),
    "mistral-7b": (7.242, 7.242),
    "qwen2.5-7b": (7.616, 7.616),
    "qwen3-8b": (8.191, 8.191),
    "smollm3-3b": (3.075, 3.075),
    "gemma2-9b": (9.242, 9.242),
    "gemma3-1b": (1.000, 1.000),
    "gemma3-27b": (27.009, 27.009),  # 27.432 published, with a vision tower of 0.423
    "olmo2-7b": (7.299, 7.299),
    "olmo3-7b": (7.298, 7.298),
    # Published: 20.91 and 116.83 in all; 3.61 and 5.13 active, which leave out the embedding.
    "gpt-oss-20b": (20.915, 4.187),
    "gpt-oss-120b": (116.829, 5.712),
    "mixtral-8x7b": (46.703, 12.880),
    "qwen2-moe-57b-a14b": (57.409, 14.249),
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
    "relu2": Model(preset="tiny", mlp="relu2"),
    "geglu-sandwich": Model(preset="tiny", mlp="geglu", norm="sandwich", norm_offset=True),
    "post-norm-over-all": Model(preset="tiny", norm="post", qk_norm=True, qk_norm_over="all"),
    "window-and-bias": Model(
        preset="tiny", window=Window(size=16, full_every=2), attention_bias=True, nope_every=2
    ),
    "wide-heads": Model(preset="tiny", head_dim=32),
    "sinks-and-out-bias": Model(preset="tiny", attention_sinks=True, attention_out_bias=True),
    "moe": Model(preset="tiny-moe"),
    "moe-biases": Model(
        preset="tiny",
        mlp="swiglu-clamped",
        moe=Moe(experts=4, top_k=2, ffn=64, first_dense_layers=1, biases=True),
    ),
    "moe-shared": Model(
        preset="tiny",
        moe=Moe(experts=4, top_k=2, ffn=64, shared_experts=2, first_dense_layers=1),
    ),
    "moe-shared-gate": Model(
        preset="tiny", moe=Moe(experts=4, top_k=2, ffn=64, shared_experts=1, shared_gate=True)
    ),
    "mtp": Model(preset="tiny", mtp=MultiTokenPrediction(layers=2)),
    "mtp-moe": Model(
        preset="tiny",
        moe=Moe(experts=4, top_k=2, ffn=64, shared_experts=2, first_dense_layers=1),
        mtp=MultiTokenPrediction(),
    ),
    "latent": Model(
        preset="tiny",
        kv_heads=8,
        latent=LatentAttentionShape(
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
        latent=LatentAttentionShape(
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


def test_what_predicts_further_on_costs_its_layers_and_a_turn_of_the_head_each() -> None:
    plain, ahead = VARIANTS["dense"], VARIANTS["mtp"]
    flops, more = forward_flops_per_token(plain, 64), forward_flops_per_token(ahead, 64)
    assert more.per_layer == flops.per_layer and more.head == 3 * flops.head
    assert more.prediction == 2 * (flops.per_layer[-1] + 4 * 128 * 128)
    each = flops.per_layer[-1] + 4 * 128 * 128 + flops.head
    step, longer = flops_per_token(plain, 64), flops_per_token(ahead, 64)
    assert longer.model_flops - step.model_flops == 3 * 2 * each


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


def test_a_window_costs_the_keys_that_it_shows() -> None:
    sequence, window = 256, 64
    plain = resolve_model(Model(preset="tiny"))
    near = structs.replace(plain, window=Window(size=window, full_every=4))
    seen_by_all = sum(position + 0.5 for position in range(sequence))
    seen = sum(min(position + 0.5, window) for position in range(sequence))
    each = 2 * plain.heads * 2 * plain.head_dim  # FLOPs of a query and a key
    saved = 3 * (seen_by_all - seen) / sequence * each  # three of four layers have the window
    difference = sum(forward_flops_per_token(plain, sequence).per_layer) - sum(
        forward_flops_per_token(near, sequence).per_layer
    )
    assert difference == pytest.approx(saved, rel=1e-3)
    share = (3 * seen + seen_by_all) / (4 * seen_by_all)
    assert attended_share(near, sequence) == pytest.approx(share, rel=1e-3)
    assert attended_share(plain, sequence) == 1.0
    wide = structs.replace(plain, window=Window(size=10 * sequence))
    assert forward_flops_per_token(wide, sequence) == forward_flops_per_token(plain, sequence)
    assert attended_share(wide, sequence) == 1.0


def test_frozen_weights_need_no_gradient_and_a_reference_another_forward() -> None:
    model = PRESETS["llama3-8b"]
    forward = forward_flops_per_token(model, 4096)
    passes = sum(forward.per_layer) + forward.head
    plain = flops_per_token(model, 4096).model_flops
    frozen = flops_per_token(model, 4096, frozen=True).model_flops
    scores = passes - 2 * (parameters(model).total - model.vocab * model.dim)
    # Backward of scores has no weights: all of it stays.
    assert plain - frozen == pytest.approx(passes - scores, rel=1e-4)
    both = flops_per_token(model, 4096, frozen=True, reference=True).model_flops
    assert both - frozen == passes
