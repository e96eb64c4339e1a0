"""The search: only valid mappings, all of them priced alike, the best one chosen."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.config import PRESETS, ConfigError, resolve
from phalanx.hardware import cluster
from phalanx.plan import Mapping, Pins, Workload, predict, search
from phalanx.plan.emit import job_of
from phalanx.plan.space import enumerate_mappings

SMALL = Workload(model=PRESETS["llama3-8b"], sequence=8192, global_batch=256)


def workload(preset: str, global_batch: int = 2048) -> Workload:
    return Workload(model=PRESETS[preset], sequence=8192, global_batch=global_batch)


@pytest.mark.parametrize(
    ("preset", "gpus"), [("llama3-8b", 64), ("mixtral-8x7b", 32), ("deepseek-v3", 128)]
)
def test_every_enumerated_mapping_fills_the_gpus_and_passes_the_trainers_rules(
    preset: str, gpus: int
) -> None:
    question = Workload(model=PRESETS[preset], sequence=4096, global_batch=256)
    grid = enumerate_mappings(question, cluster(f"h100-{gpus}"), gpus, Pins(), "bfloat16")
    assert (grid.gpus == gpus).all()
    chosen = np.random.default_rng(0).choice(len(grid), size=200, replace=False)
    for index in chosen.tolist():
        mapping = grid.mapping(index)
        job = job_of("plan", question, mapping, tokens=10**9, checkpoint_steps=100)
        assert resolve(job, gpus).parallel.virtual_stages == mapping.virtual_stages


def test_the_chosen_mapping_costs_what_predict_says() -> None:
    result = search(SMALL, cluster("h100-64"))
    first = result.top[0]
    again = predict(SMALL, first.mapping, cluster("h100-64"))
    assert again == result.best
    assert first.step_seconds == pytest.approx(again.step_seconds, rel=1e-12)
    assert first.memory_bytes == pytest.approx(again.memory_bytes, rel=1e-12)
    assert again.fits


def test_the_front_has_no_mapping_that_another_beats() -> None:
    front = search(SMALL, cluster("h100-64")).pareto
    times = [candidate.step_seconds for candidate in front]
    sizes = [candidate.memory_bytes for candidate in front]
    assert times == sorted(times) and sizes == sorted(sizes, reverse=True)


def test_the_robust_choice_is_best_at_the_90th_percentile() -> None:
    on = cluster("h100-512")
    question = workload("llama3-70b", 512)
    robust, plain = search(question, on), search(question, on, robust=False)
    assert robust.top[0].step_seconds_p90 <= plain.top[0].step_seconds_p90
    assert plain.top[0].step_seconds <= robust.top[0].step_seconds


@pytest.mark.parametrize("preset", ["llama3-8b", "llama3-70b", "llama3-405b"])
def test_tensor_stays_inside_the_domain_unless_it_is_pinned(preset: str) -> None:
    question, on = workload(preset), cluster("h100-1024")
    assert search(question, on).best.mapping.tensor <= on.domain_gpus
    wide = Workload(model=PRESETS["gpt3-175b"], sequence=2048, global_batch=2048)
    forced = search(wide, on, pins=Pins(tensor=16))
    assert forced.best.mapping.tensor == 16
    assert search(wide, on).best.step_seconds < forced.best.step_seconds


def test_pins_are_kept() -> None:
    pins = Pins(tensor=4, pipeline=2, zero=1, recompute="full", micro_batch=2)
    for candidate in search(SMALL, cluster("h100-64"), pins=pins).top:
        mapping = candidate.mapping
        assert (mapping.tensor, mapping.pipeline, mapping.zero) == (4, 2, 1)
        assert (mapping.recompute, mapping.micro_batch) == ("full", 2)


def test_the_memory_objective_takes_the_smallest() -> None:
    result = search(SMALL, cluster("h100-64"), objective="memory")
    assert result.best.memory_bytes == min(c.memory_bytes for c in result.pareto)


def test_a_model_that_cannot_fit_says_the_least_that_would() -> None:
    with pytest.raises(ConfigError, match=r"nothing fits.*GiB.*try about \d+ GPUs"):
        search(workload("llama3-405b", 64), cluster("h100-16"), pins=Pins(offload="none"))


def test_gpus_without_a_valid_mapping_are_refused_with_the_rule() -> None:
    with pytest.raises(ConfigError, match="no mapping is valid"):
        search(workload("llama3-8b", 1), cluster("h100-65536"))


def test_a_mapping_larger_than_the_cluster_is_refused() -> None:
    with pytest.raises(ConfigError, match="exceeds"):
        predict(SMALL, Mapping(tensor=8, data=16), cluster("h100-64"))
