"""Plans as jobs: what the trainer accepts, written as a person would."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from phalanx.config import PRESETS, Adapter, ConfigError, check, load_job, resolve_model
from phalanx.plan.question.emit import job_of, job_toml, workload_of
from phalanx.plan.workload import Mapping, Workload

LLAMA = Workload(model=resolve_model(PRESETS["llama3-70b"]), sequence=8192, global_batch=512)
MAPPING = Mapping(
    tensor=8,
    pipeline=4,
    data=16,
    zero=1,
    recompute="selective",
    schedule="interleaved",
    virtual_stages=4,
)


def test_a_plan_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    job = job_of("mine", LLAMA, MAPPING, 10**12, 25)
    path = tmp_path / "job.toml"
    path.write_text(job_toml(job, ["why"]), encoding="utf-8")
    loaded = load_job(path)
    check(loaded, MAPPING.gpus)
    assert loaded.parallel == job.parallel
    assert (loaded.memory, loaded.train, loaded.checkpoint) == (
        job.memory,
        job.train,
        job.checkpoint,
    )
    assert resolve_model(loaded.model) == LLAMA.model


def test_adapters_and_an_average_are_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    for kind, averaged in (("lora", False), ("none", True)):
        adapter = Adapter(kind=kind, rank=8) if kind == "lora" else None  # type: ignore[arg-type]
        trains = "adapters" if adapter else "all"
        changed = structs.replace(LLAMA, adapter=adapter, trains=trains, averaged=averaged)
        path.write_text(job_toml(job_of("mine", changed, MAPPING, 10**9, 0)), encoding="utf-8")
        assert workload_of(load_job(path)).adapter == adapter
        assert workload_of(load_job(path)).averaged == averaged


def test_the_steps_cover_the_tokens() -> None:
    job = job_of("mine", LLAMA, MAPPING, 10**12, 25)
    assert (job.train.steps - 1) * LLAMA.tokens < 10**12 <= job.train.steps * LLAMA.tokens


def test_fp8_and_a_model_without_a_preset_are_written_out(tmp_path: Path) -> None:
    changed = structs.replace(LLAMA, model=structs.replace(LLAMA.model, layers=40))
    job = job_of("mine", changed, structs.replace(MAPPING, precision="fp8"), 10**9, 0)
    path = tmp_path / "job.toml"
    path.write_text(job_toml(job), encoding="utf-8")
    assert load_job(path).precision.fp8
    assert load_job(path).model.layers == 40


@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        (Mapping(pipeline=4, data=4, schedule="dualpipe"), "--schedule zero-bubble"),
        (Mapping(data=8, precision="nvfp4"), "--precision fp8"),
        (Mapping(tensor=16, data=2), "kv_heads"),
        (Mapping(pipeline=4, data=512, schedule="1f1b"), "micro-batches"),
    ],
)
def test_what_the_trainer_cannot_run_is_not_emitted(mapping: Mapping, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        job_of("mine", LLAMA, mapping, 10**9, 0)
