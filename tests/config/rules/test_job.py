"""Checking: each impossible combination is refused with its key, rule and nearest fix."""

from __future__ import annotations

import re
from typing import Any

import pytest

from phalanx.config import (
    PRESETS,
    ConfigError,
    ConfigProblem,
    Job,
    Model,
    Train,
    check,
    job_from_table,
    load_job,
)


def problems(world_size: int, *overrides: str, preset: str = "tiny") -> list[ConfigProblem]:
    table: dict[str, Any] = {"model": {"preset": preset}}
    try:
        check(job_from_table(table, overrides), world_size)
    except ConfigError as error:
        return list(error.problems)
    return []


# world size, overrides, key, part of the rule, part of the fix
REFUSED: list[tuple[int, list[str], str, str, str]] = [
    (1, ["name=a/b"], "name", "a folder's name", 'nearest: "a-b"'),
    (1, ["name=" + "a" * 201], "name", "at most 200 bytes", 'e.g. "aaa'),
    (1, ['name="a\\u0000b"'], "name", "control characters", 'nearest: "ab"'),
    (1, ['data.blend={"x"={path="a\\nb"}}'], "data.blend.x.path", "control", 'nearest: "ab"'),
    (1, ["name=a\udcffb"], "name", "control characters", 'nearest: "ab"'),
    (1, ["runs=s3://bucket/runs"], "runs", "a folder of this machine", "archive.url"),
    (1, ["checkpoint.archive.url=s4://b"], "checkpoint.archive.url", '"s4"', "known: s3"),
    (1, ["evaluate.every=5"], "evaluate.every", "nothing is named", "evaluate.tasks"),
    (1, ['evaluate.tasks=["arc"]'], "evaluate.tasks", "never scored", "evaluate.every"),
    (1, ['evaluate.perplexity={a="b"}'], "evaluate.perplexity", "never scored", "evaluate.every"),
    (1, ["optimizer.spike_factor=0.5"], "optimizer.spike_factor", "skip ordinary", "nearest: 2"),
    *(
        (
            2,
            ["train.verify_every=5", f"parallel.{axis}=2"],
            "train.verify_every",
            rule,
            "set it to 0",
        )
        for axis, rule in (
            ("tensor", "with parallel.tensor = 2 a rank computes a part"),
            ("pipeline", "with parallel.pipeline = 2"),
            ("context", "with parallel.context = 2"),
        )
    ),
    (
        *(2, ["train.verify_every=5", "parallel.zero=1"], "train.verify_every"),
        *("parallel.zero = 1 has none for each", "parallel.zero = 3"),
    ),
    (6, ["parallel.data=4"], "world size", "1 * 4 * 1 * 1 = 4", "parallel.data = 6"),
    (7, ["parallel.tensor=2"], "world size", "= 6", "start 6 ranks"),
    (8, ["parallel.tensor=8"], "parallel.tensor", "model.kv_heads (4)", "nearest: 4"),
    (3, ["parallel.tensor=3"], "parallel.tensor", "row groups of model.ffn", "nearest: 1"),
    (4, ["parallel.tensor=4", "model.vocab=4094"], "parallel.tensor", "model.vocab", "4096"),
    (4, ["parallel.tensor=4", "model.ffn=36"], "parallel.tensor", "(2)", "nearest: 2"),
    (5, ["parallel.pipeline=5"], "parallel.pipeline", "model.layers (4)", "parallel.pipeline = 4"),
    (
        4,
        ["parallel.pipeline=4", "parallel.schedule=interleaved"],
        "parallel.virtual_stages",
        "8 stages",
        'set parallel.schedule = "1f1b"',
    ),
    (1, ["parallel.virtual_stages=2"], "parallel.virtual_stages", "no pipeline", "leave it out"),
    (
        2,
        ["parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.virtual_stages=1"],
        "parallel.virtual_stages",
        "at least 2",
        "2",
    ),
    (
        2,
        ["parallel.pipeline=2", "parallel.schedule=zero-bubble", "parallel.virtual_stages=1"],
        "parallel.virtual_stages",
        "exactly 2",
        "2",
    ),
    (
        2,
        ["parallel.pipeline=2", "parallel.virtual_stages=2"],
        "parallel.virtual_stages",
        "exactly 1",
        "1",
    ),
    (
        8,
        ["parallel.pipeline=4", "parallel.data=2", "train.global_batch=6"],
        "train.global_batch",
        "3 micro-batches",
        "nearest: 8",
    ),
    (
        2,
        ["parallel.pipeline=2", "parallel.schedule=zero-bubble", "train.global_batch=1"],
        "train.global_batch",
        "at least 2",
        "nearest: 2",
    ),
    (
        2,
        ["parallel.pipeline=2", "parallel.schedule=interleaved", "train.global_batch=5"],
        "train.global_batch",
        "2 equal rounds",
        "nearest: 4",
    ),
    (
        2,
        ["parallel.pipeline=2", "parallel.schedule=zero-bubble", "train.compile=on"],
        "train.compile",
        "splits backward",
        "off",
    ),
    (
        2,
        ["parallel.pipeline=2", "parallel.schedule=zero-bubble", "memory.recompute=selective"],
        "memory.recompute",
        "splits backward",
        "full",
    ),
    (
        2,
        ["parallel.context=2", "parallel.context_method=ring", "data.sequence=1022"],
        "data.sequence",
        "multiple of 4",
        "nearest: 1024",
    ),
    (3, ["parallel.context=3", "data.sequence=100"], "data.sequence", "multiple of 6", "102"),
    (2, ["parallel.tensor=2", "data.sequence=127"], "data.sequence", "multiple of 2", "128"),
    (
        8,
        ["parallel.context=8", "parallel.context_method=ulysses"],
        "parallel.context",
        "model.kv_heads / tensor (4 / 1)",
        "nearest: 4",
    ),
    (4, ["parallel.replicate=3"], "parallel.replicate", "parallel.data (4)", "nearest: 2"),
    (4, ["parallel.replicate=2", "parallel.zero=0"], "parallel.replicate", "full copy", "zero = 3"),
    (2, ["parallel.expert=2"], "parallel.expert", "no experts", "1"),
    (1, ["parallel.async_tensor=true"], "parallel.async_tensor", "tensor is 1", "false"),
    (
        2,
        ["parallel.async_tensor=true", "parallel.tensor=2", "train.compile=off"],
        "parallel.async_tensor",
        "compiler",
        "auto",
    ),
    (
        4,
        ["parallel.pipeline=2", "parallel.schedule=zero-bubble", "parallel.zero=3"],
        "parallel.zero",
        "stay gathered",
        "nearest: 2",
    ),
    (1, ["model.kv_heads=3"], "model.kv_heads", "divide model.heads (8)", "nearest: 2"),
    (1, ["model.heads=7", "model.kv_heads=7", "model.head_dim=0"], "model.heads", "128", "8"),
    (1, ["model.head_dim=15"], "model.head_dim", "even", "16"),
    (1, ["model.ffn=0"], "model.ffn", "hidden width", "512"),
    (
        1,
        ["model.rope_scaling.low_frequency_factor=4"],
        "model.rope_scaling.low_frequency_factor",
        "below",
        "1.0",
    ),
    (1, ["precision.fp8=true", "model.dim=120"], "model.dim", "multiple of 16", "128"),
    (1, ["precision.fp8=true", "precision.compute=float16"], "precision.compute", "bf", "bf"),
    (
        2,
        ["precision.fp8=true", "parallel.tensor=2", "model.ffn=1040"],
        "model.ffn / parallel.tensor",
        "multiple of 16",
        "nearest: 512",
    ),
    (
        1,
        ["precision.compute=float16", "optimizer.skip_non_finite=false"],
        "optimizer.skip_non_finite",
        "loss scale",
        "bfloat16",
    ),
    (2, ["memory.offload=parameters", "parallel.zero=0"], "memory.offload", "zero >= 1", "3"),
    (1, ["memory.offload_folder=/nvme"], "memory.offload_folder", "the optimizer's", "optimizer"),
    (
        1,
        ["memory.offload=optimizer", "memory.offload_folder=/nvme", "optimizer.kind=muon"],
        "memory.offload_folder",
        "AdamW alone",
        "adamw",
    ),
    (
        2,
        ["optimizer.state=int8", "parallel.tensor=2", "model.ffn=640"],
        "optimizer.state",
        "blocks of 128",
        "bfloat16",
    ),
    (1, ["data.source=shards"], "data.path", "folder", "phalanx data tokenize"),
    (1, ["data.path=x"], "data.path", "no files", "shards"),
    (1, ["train.validate_every=5"], "train.validate_every", "held out", "validation_fraction"),
    (1, ["schedule.warmup_steps=101"], "schedule.warmup_steps", "train.steps (100)", "100"),
    (1, ["schedule.kind=wsd"], "schedule.decay_steps", "decay", "10"),
    (1, ["schedule.decay_steps=5"], "schedule.decay_steps", "no meaning", "wsd"),
    (
        1,
        ["schedule.kind=wsd", "schedule.warmup_steps=60", "schedule.decay_steps=50"],
        "schedule.decay_steps",
        "fit into",
        "nearest: 40",
    ),
    (1, ["train.micro_batch=16"], "train.micro_batch", "global_batch (8)", "8"),
    (1, ["log.profile_steps=[5, 5]"], "log.profile_steps", "first below last", "[0, 3]"),
    (1, ["log.profile_steps=[5, 500]"], "log.profile_steps", "within train.steps", "[0, 3]"),
    (1, ["name=a/b"], "name", "no slash", "a-b"),
    (1, ["checkpoint.resume=auto", "checkpoint.load_hf=x"], "checkpoint.load_hf", "both", ""),
    (1, ["checkpoint.load_hf=x", "model.mlp=gelu"], "checkpoint.load_hf", "no layout", ""),
]


@pytest.mark.parametrize(
    ("world_size", "overrides", "key", "rule", "fix"),
    REFUSED,
    ids=[" ".join(case[1]) for case in REFUSED],
)
def test_impossible_combination_is_refused(
    world_size: int, overrides: list[str], key: str, rule: str, fix: str
) -> None:
    found = problems(world_size, *overrides)
    matching = [p for p in found if p.key == key and rule in p.rule and fix in p.fix]
    assert matching, found


MOE_REFUSED: list[tuple[int, list[str], str, str, str]] = [
    (3, ["parallel.expert=3"], "parallel.expert", "experts (8)", "nearest: 1"),
    (2, ["parallel.expert=4"], "parallel.expert", "tensor (2)", "nearest: 2"),
    (2, ["parallel.expert=2", "parallel.zero=0"], "parallel.expert", "(1)", "zero = 3"),
    (1, ["model.moe.top_k=9"], "model.moe.top_k", "experts (8)", "nearest: 8"),
    (1, ["model.moe.first_dense_layers=4"], "model.moe.first_dense_layers", "none", "3"),
    (1, ["model.moe.shared_ffn=64"], "model.moe.shared_ffn", "shared experts", "= 1"),
    (1, ["model.mlp=gelu"], "model.mlp", "swiglu", "swiglu"),
]


@pytest.mark.parametrize(
    ("world_size", "overrides", "key", "rule", "fix"),
    MOE_REFUSED,
    ids=[" ".join(case[1]) for case in MOE_REFUSED],
)
def test_impossible_expert_combination_is_refused(
    world_size: int, overrides: list[str], key: str, rule: str, fix: str
) -> None:
    found = problems(world_size, *overrides, preset="tiny-moe")
    matching = [p for p in found if p.key == key and rule in p.rule and fix in p.fix]
    assert matching, found


LATENT_REFUSED = [
    ("model.kv_heads=8", "model.kv_heads"),
    ("model.latent.rope_head_dim=31", "model.latent.rope_head_dim"),
    ("model.qk_norm=true", "model.qk_norm"),
]


def test_ring_attention_refuses_values_wider_than_keys() -> None:
    ring = ["parallel.context=2", "parallel.context_method=ring"]
    wide = "model.latent.value_head_dim=256"
    keys = {found.key for found in problems(2, *ring, wide, preset="deepseek-v3")}
    assert keys == {"model.latent.value_head_dim"}
    assert problems(2, *ring, preset="deepseek-v3") == []


@pytest.mark.parametrize(("override", "key"), LATENT_REFUSED)
def test_latent_attention_has_its_own_rules(override: str, key: str) -> None:
    assert key in {found.key for found in problems(1, override, preset="deepseek-v3")}


ACCEPTED: list[tuple[int, list[str], str]] = [
    (4, [], "tiny"),
    (3, ["train.global_batch=8"], "tiny"),
    (4, ["parallel.replicate=2"], "tiny"),
    (4, ["parallel.zero=0"], "tiny"),
    (4, ["parallel.tensor=4"], "tiny"),
    (4, ["parallel.pipeline=4"], "tiny"),
    (2, ["parallel.pipeline=2", "parallel.schedule=interleaved"], "tiny"),
    (2, ["parallel.pipeline=2", "parallel.schedule=zero-bubble"], "tiny"),
    (8, ["parallel.pipeline=2", "parallel.tensor=2"], "tiny"),
    (4, ["parallel.context=2", "parallel.tensor=2"], "tiny"),
    (2, ["parallel.context=2", "data.document_mask=true"], "tiny"),
    (8, ["parallel.context=8", "data.document_mask=true"], "tiny"),
    (8, ["parallel.expert=2", "parallel.pipeline=2"], "tiny-moe"),
    (
        16384,
        ["parallel.tensor=8", "parallel.pipeline=16", "train.global_batch=2048"],
        "llama3-405b",
    ),
    (98304, ["parallel.tensor=8", "parallel.pipeline=16", "train.global_batch=12288"], "dense-1t"),
    (1024, ["parallel.tensor=8", "parallel.expert=64"], "deepseek-v3"),
    (4, ["parallel.tensor=4", "model.moe.ffn=33"], "tiny-moe"),
    (64, ["parallel.tensor=8"], "gpt3-175b"),
    (1, ["precision.fp8=true"], "llama3-3b"),
    (1, ["backend.environment.MLFLOW_TRACKING_URI=sqlite:///curves.db"], "tiny"),
    (1, ["schedule.kind=wsd", "schedule.warmup_steps=50", "schedule.decay_steps=50"], "tiny"),
]


@pytest.mark.parametrize(
    ("world_size", "overrides", "preset"), ACCEPTED, ids=[" ".join(case[1]) for case in ACCEPTED]
)
def test_possible_combination_is_accepted(
    world_size: int, overrides: list[str], preset: str
) -> None:
    assert problems(world_size, *overrides, preset=preset) == []


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_runs_on_one_rank(preset: str) -> None:
    assert problems(1, preset=preset) == []


def test_all_problems_are_reported_together() -> None:
    found = problems(16, "parallel.tensor=3", "parallel.pipeline=5", "schedule.kind=wsd")
    keys = {p.key for p in found}
    assert keys >= {"world size", "parallel.tensor", "parallel.pipeline", "schedule.decay_steps"}


def test_a_job_without_a_shape_is_sent_to_the_presets() -> None:
    with pytest.raises(ConfigError, match=r"model: no shape is given; .*llama3-8b"):
        check(Job(), 1)


def test_a_half_given_shape_names_each_missing_field() -> None:
    with pytest.raises(ConfigError) as caught:
        check(Job(model=Model(dim=64, heads=4, ffn=64)), 1)
    assert {p.key for p in caught.value.problems} == {"model.layers", "model.vocab"}


def test_a_job_built_in_code_is_held_to_the_same_bounds() -> None:
    with pytest.raises(ConfigError, match=re.escape("train.steps = 0")):
        check(Job(model=Model(preset="tiny"), train=Train(steps=0)), 1)


@pytest.mark.parametrize("name", ["tiny", "tiny-moe", "demo", "llama3-405b", "dense-1t"])
def test_examples_are_valid_jobs(name: str, request: pytest.FixtureRequest) -> None:
    from phalanx.config import default_world_size

    job = load_job(request.config.rootpath / "examples" / f"{name}.toml")
    check(job, default_world_size(job, devices=0))
