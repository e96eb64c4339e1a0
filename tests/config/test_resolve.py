"""Resolving: what follows from other settings becomes explicit."""

from __future__ import annotations

import pytest

from phalanx.config import (
    ConfigError,
    Data,
    Job,
    LatentAttentionShape,
    Model,
    Moe,
    Parallel,
    Train,
    default_world_size,
    gate_up_groups,
    resolve,
    resolve_model,
)

TINY = Model(preset="tiny")


def axes(parallel: Parallel, world_size: int, data: Data | None = None) -> Parallel:
    return resolve(Job(model=TINY, parallel=parallel, data=data or Data()), world_size).parallel


def test_a_model_made_in_code_takes_the_rest_from_its_preset() -> None:
    model = resolve_model(Model(preset="tiny", layers=2))
    assert (model.dim, model.layers, model.vocab) == (128, 2, 4096)


def test_an_unknown_preset_in_code_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match='did you mean "llama3-8b"'):
        resolve_model(Model(preset="llama3_8b"))


def test_heads_follow_from_each_other() -> None:
    model = resolve_model(Model(dim=96, layers=1, heads=6, ffn=64, vocab=10))
    assert (model.kv_heads, model.head_dim) == (6, 16)


def test_latent_attention_sets_the_head_width() -> None:
    latent = LatentAttentionShape(content_head_dim=8, rope_head_dim=4)
    model = Model(dim=96, layers=1, heads=6, ffn=64, vocab=10, latent=latent)
    assert resolve_model(model).head_dim == 12


def test_shared_experts_get_their_joint_width() -> None:
    moe = Moe(experts=4, top_k=2, ffn=32, shared_experts=3)
    resolved = resolve_model(Model(preset="tiny", moe=moe))
    assert resolved.moe is not None and resolved.moe.shared_ffn == 96


def test_data_takes_what_the_world_leaves() -> None:
    assert axes(Parallel(tensor=2, pipeline=2), 24).data == 6


@pytest.mark.parametrize(("zero", "replicate"), [(0, 4), (1, 1), (3, 1)])
def test_zero_0_replicates_everything(zero: int, replicate: int) -> None:
    assert axes(Parallel(zero=zero), 4).replicate == replicate  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schedule", "stages"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 2)]
)
def test_each_schedule_has_its_usual_number_of_stages(schedule: str, stages: int) -> None:
    parallel = Parallel(pipeline=2, schedule=schedule)  # type: ignore[arg-type]
    assert axes(parallel, 2).virtual_stages == stages


def test_ulysses_is_chosen_where_heads_suffice() -> None:
    assert axes(Parallel(context=4), 4).context_method == "ulysses"
    assert axes(Parallel(context=4, tensor=2), 8).context_method == "ring"
    masked = Data(document_mask=True)
    assert axes(Parallel(context=4, tensor=2), 8, masked).context_method == "ring"
    assert axes(Parallel(context=4), 4, masked).context_method == "ulysses"


def test_resolving_twice_changes_nothing() -> None:
    once = resolve(Job(model=TINY, parallel=Parallel(tensor=2, zero=0)), 8)
    assert resolve(once, 8) == once


@pytest.mark.parametrize(
    ("parallel", "device", "devices", "expected"),
    [
        (Parallel(data=2, tensor=2), "auto", 8, 4),
        (Parallel(tensor=2), "auto", 8, 8),
        (Parallel(tensor=2), "auto", 0, 2),
        (Parallel(tensor=2), "cpu", 8, 2),
        (Parallel(), "auto", 0, 1),
    ],
)
def test_world_size_when_nobody_says(
    parallel: Parallel, device: str, devices: int, expected: int
) -> None:
    job = Job(parallel=parallel, train=Train(device=device))  # type: ignore[arg-type]
    assert default_world_size(job, devices) == expected


@pytest.mark.parametrize(
    ("ffn", "groups"), [(8192, 64), (512, 32), (768, 32), (53248, 64), (48, 2), (17, 1), (8, 1)]
)
def test_row_groups_are_powers_of_two_of_at_least_16_rows(ffn: int, groups: int) -> None:
    assert gate_up_groups(ffn) == groups
