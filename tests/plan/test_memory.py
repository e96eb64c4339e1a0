"""Memory: exact against the trainer's own modules, and against published readings."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import Job, check, job_from_table, resolve
from phalanx.hardware import cluster
from phalanx.parallel.dryrun import dry_run
from phalanx.plan import Mapping, Workload, predict
from phalanx.plan.check import check_rows

# World size, preset, parallel settings and the rest of the job.
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
    "experts": (32, "mixtral-8x7b", {"zero": 3, "expert": 8, "tensor": 2}),
    "latent attention and experts": (
        512,
        "deepseek-v3",
        {"zero": 1, "expert": 32, "tensor": 4, "pipeline": 8},
    ),
}


def job_of(world_size: int, preset: str, parallel: dict[str, Any]) -> Job:
    table = {
        "model": {"preset": preset},
        "data": {"sequence": 4096},
        "parallel": parallel,
        "train": {"global_batch": 2048, "device": "cuda"},
    }
    job = resolve(job_from_table(table), world_size)
    check(job, world_size)
    return job


def mapping_of(job: Job) -> Mapping:
    axes = job.parallel
    return Mapping(
        tensor=axes.tensor,
        pipeline=axes.pipeline,
        data=axes.data,
        context=axes.context,
        expert=axes.expert,
        zero=axes.zero,
        replicate=axes.replicate,
        micro_batch=job.train.micro_batch,
        schedule=axes.schedule,
        virtual_stages=axes.virtual_stages,
    )


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_state_equals_what_the_trainer_would_hold_to_the_byte(name: str) -> None:
    world_size, preset, parallel = CONFIGURATIONS[name]
    job = job_of(world_size, preset, parallel)
    workload = Workload(model=job.model, sequence=4096, global_batch=2048)
    planned = predict(workload, mapping_of(job), cluster(f"h100-{world_size}")).memory
    held = dry_run(job, world_size).rows
    assert [(s.weight_bytes, s.gradient_bytes, s.optimizer_bytes) for s in planned] == [
        (row.weight_bytes, row.gradient_bytes, row.optimizer_bytes) for row in held
    ]
    assert [stage.layers for stage in planned] == [len(row.layers) for row in held]


def test_published_memory_is_met_and_every_failure_is_foreseen() -> None:
    with resources.as_file(resources.files("phalanx.plan") / "data/published_runs.csv") as path:
        report = check_rows(Path(path))
    assert report.memory is not None
    assert report.memory.n > 50 and report.memory.out_of_memory > 0
    assert report.memory.within_15 >= 0.9
    assert report.memory.out_of_memory_found == report.memory.out_of_memory
