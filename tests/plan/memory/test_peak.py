"""Memory: exact against the trainer's own modules, and against published readings."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from phalanx.config import (
    PRESETS,
    Data,
    Job,
    Precision,
    SequenceStage,
    Train,
    check,
    job_from_table,
    resolve,
)
from phalanx.hardware import cluster
from phalanx.parallel.dryrun import dry_run
from phalanx.plan import plan_job, predict
from phalanx.plan.cost.predict import StageMemory
from phalanx.plan.evidence.check import check_rows
from phalanx.plan.question.emit import mapping_of, workload_of
from phalanx.plan.search.gpus_that_fit import fit_of
from phalanx.plan.workload import Software

# World size, preset, parallel settings and the rest of the job.
# A setting with a dot is of another section.
CONFIGURATIONS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one GPU": (1, "llama3-1b", {}),
    "copies": (8, "llama3-1b", {"zero": 0}),
    "ZeRO 1": (16, "llama3-8b", {"zero": 1}),
    "ZeRO 2 with tensor": (64, "llama3-8b", {"zero": 2, "tensor": 4}),
    "ZeRO 3 over odd ranks": (24, "llama3-3b", {"zero": 3}),
    "HSDP": (64, "llama3-8b", {"zero": 3, "replicate": 4}),
    "context": (32, "llama3-8b", {"zero": 3, "context": 4, "tensor": 2}),
    "pipeline": (256, "llama3-70b", {"zero": 1, "tensor": 8, "pipeline": 4}),
    "interleaved": (
        1024,
        "llama3-405b",
        {"zero": 1, "tensor": 8, "pipeline": 8, "schedule": "interleaved", "virtual_stages": 3},
    ),
    "zero-bubble": (
        64,
        "llama3-8b",
        {"zero": 2, "tensor": 2, "pipeline": 4, "schedule": "zero-bubble"},
    ),
    "selective recompute": (16, "llama3-8b", {"tensor": 4, "memory.recompute": "selective"}),
    "full recompute of experts": (32, "deepseek-v3", {"expert": 8, "memory.recompute": "full"}),
    "fp8": (8, "llama3-8b", {"precision.fp8": True}),
    "optimizer offload": (16, "llama3-8b", {"zero": 1, "memory.offload": "optimizer"}),
    "optimizer offload of shards": (16, "llama3-8b", {"zero": 3, "memory.offload": "optimizer"}),
    "parameter offload": (
        16,
        "llama3-8b",
        {"zero": 3, "memory.offload": "parameters", "memory.offload_activations": True},
    ),
    "experts": (32, "mixtral-8x7b", {"zero": 3, "expert": 8, "tensor": 2}),
    "gated shared experts": (16, "qwen2-moe-57b-a14b", {"expert": 4, "tensor": 2}),
    "multi-token prediction": (
        32,
        "deepseek-v3",
        {"expert": 8, "tensor": 2, "model.mtp": {"layers": 2}},
    ),
    "tied embedding in a pipeline": (
        64,
        "smollm3-3b",
        {"zero": 1, "tensor": 4, "pipeline": 4},
    ),
    "tied embedding in a pipeline alone": (4, "smollm3-3b", {"pipeline": 4}),
    "tied embedding where stages fold back": (
        32,
        "smollm3-3b",
        {"zero": 2, "pipeline": 4, "schedule": "zero-bubble"},
    ),
    "multi-token prediction in a pipeline": (
        64,
        "deepseek-v3",
        {"zero": 1, "expert": 8, "pipeline": 4, "model.mtp": {"layers": 1}},
    ),
    "LoRA on one GPU": (1, "llama3-3b", {"adapter.kind": "lora"}),
    "LoRA, sharded": (16, "llama3-8b", {"adapter.kind": "lora", "adapter.rank": 24}),
    "LoRA on some matrices of an MLP without a gate": (
        8,
        "gpt3-175b",
        {"zero": 1, "tensor": 8, "adapter.kind": "lora", "adapter.targets": ["q_proj", "up_proj"]},
    ),
    "LoRA in a tied pipeline": (
        16,
        "smollm3-3b",
        {"zero": 2, "tensor": 2, "pipeline": 4, "adapter.kind": "lora"},
    ),
    "DoRA beside experts": (
        8,
        "mixtral-8x7b",
        {
            "adapter.kind": "dora",
            "adapter.targets": ["q_proj", "k_proj", "v_proj", "o_proj"],
        },
    ),
    "latent attention and experts": (
        512,
        "deepseek-v3",
        {"zero": 1, "expert": 32, "tensor": 4, "pipeline": 8},
    ),
}


def job_of(world_size: int, preset: str, chosen: dict[str, Any]) -> Job:
    parallel = {key: value for key, value in chosen.items() if "." not in key}
    table: dict[str, dict[str, Any]] = {
        "model": {"preset": preset},
        "data": {"sequence": 4096},
        "parallel": parallel,
        "train": {"global_batch": 2048, "device": "cuda"},
    }
    for key, value in chosen.items():
        section, _, name = key.rpartition(".")
        if section:
            table.setdefault(section, {})[name] = value
    job = resolve(job_from_table(table), world_size)
    check(job, world_size)
    return job


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_state_equals_what_the_trainer_would_hold_to_the_byte(name: str) -> None:
    world_size, preset, parallel = CONFIGURATIONS[name]
    job = job_of(world_size, preset, parallel)
    planned = predict(workload_of(job), mapping_of(job), cluster(f"h100-{world_size}")).memory
    held = dry_run(job, world_size).rows
    assert [(s.weight_bytes, s.gradient_bytes, s.optimizer_bytes) for s in planned] == [
        (row.weight_bytes, row.gradient_bytes, row.optimizer_bytes) for row in held
    ]
    assert [int(stage.activation_bytes) for stage in planned] == [
        row.activation_bytes for row in held
    ]
    assert [stage.layers for stage in planned] == [len(row.layers) for row in held]


def test_published_memory_is_met_and_hardly_a_run_is_misjudged() -> None:
    with resources.as_file(resources.files("phalanx.plan") / "data/published_runs.csv") as path:
        held = check_rows(Path(path)).memory
    assert held is not None and held.n > 50
    # One of BLOOM's readings is above that of the same run with twice the micro-batch.
    assert held.within_10 >= 0.95 and held.within_15 >= 0.95
    assert held.false_oom <= 0.1 * held.ran
    # BLOOM's 206B wants less than runs beside it that ran.
    assert held.failed == 11 and held.false_fit <= 1


def test_a_run_needs_less_than_it_takes_where_there_is_room() -> None:
    job = job_of(16, "llama3-8b", {"zero": 1})
    options = workload_of(job), mapping_of(job), cluster("h100-16")
    growing, fixed = (
        predict(*options, software=Software(expandable_segments=s)) for s in (True, False)
    )
    totals = (fixed.allocated_bytes, fixed.reserved_bytes, fixed.memory_bytes)
    assert totals == tuple(sorted(totals))
    assert fixed.allocated_bytes < fixed.needed_bytes < fixed.memory_bytes
    # Segments that grow hold little beside what is in use, whatever room there is.
    assert growing.memory_bytes == growing.needed_bytes == fixed.needed_bytes


@pytest.mark.parametrize(
    ("preset", "samples", "fp8", "gib"),
    [("llama3-1b", 4, False, 61.0), ("llama3-3b", 2, False, 90.8), ("llama3-3b", 2, True, 78.5)],
)
def test_what_one_h200_held_is_predicted(preset: str, samples: int, fp8: bool, gib: float) -> None:
    """Peaks of the speed claims: one micro-batch, so that gradients come as activations go."""
    job = resolve(
        Job(
            model=PRESETS[preset],
            data=Data(source="synthetic", sequence=8192),
            precision=Precision(fp8=fp8),
            train=Train(global_batch=samples, micro_batch=samples),
        ),
        1,
    )
    found = predict(workload_of(job), mapping_of(job), cluster("h200-8"))
    assert found.allocated_bytes / 2**30 == pytest.approx(gib, rel=0.03)


def test_gradients_of_several_micro_batches_stand_beside_activations() -> None:
    def held(global_batch: int) -> StageMemory:
        job = resolve(
            Job(
                name="x",
                model=PRESETS["llama3-1b"],
                train=Train(global_batch=global_batch, micro_batch=1),
            ),
            1,
        )
        (stage,) = predict(workload_of(job), mapping_of(job), cluster("h200-8")).memory
        return stage

    assert held(1).gradient_bytes == 0 or held(1).activation_bytes == 0
    assert held(2).gradient_bytes > 0 and held(2).activation_bytes > 0


def test_adapters_hold_no_state_of_the_frozen_weights() -> None:
    job = job_of(16, "llama3-8b", {"zero": 1})
    frozen = structs.replace(workload_of(job), trains="adapters")
    (stage,) = predict(frozen, mapping_of(job), cluster("h100-16")).memory
    (whole,) = predict(workload_of(job), mapping_of(job), cluster("h100-16")).memory
    assert stage.gradient_bytes == stage.optimizer_bytes == 0 < stage.weight_bytes
    assert stage.weight_bytes < whole.weight_bytes


def test_the_stage_with_the_longest_samples_decides() -> None:
    """Of a job whose samples grow longer; its layers stay where the first ones had them."""
    axes = {"zero": 1, "tensor": 4, "pipeline": 2}
    short = job_of(64, "llama3-8b", axes)
    stage = SequenceStage(after_tokens=10**8, sequence=32768, global_batch=256)
    both = structs.replace(short, train=structs.replace(short.train, sequence_stages=(stage,)))
    check(both, 64)
    rows = dry_run(both, 64).rows
    assert [row.layers for row in rows] == [row.layers for row in dry_run(short, 64).rows]
    for row, alone in zip(rows, dry_run(short, 64).rows, strict=True):
        assert row.activation_bytes > 4 * alone.activation_bytes
        assert row.weight_bytes == alone.weight_bytes
    on = cluster("h100-64")
    assert fit_of(both, 64).rank_bytes > fit_of(short, 64).rank_bytes
    plan, first = plan_job(both, on), plan_job(short, on)
    assert plan.memory_bytes > first.memory_bytes and plan.step_seconds == first.step_seconds
    assert plan.days.mid > first.days.mid
