"""The search: only valid mappings, all of them priced alike, the best one chosen."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from phalanx.config import PRESETS, ConfigError, Window, resolve
from phalanx.hardware import Cluster, cluster
from phalanx.plan import Mapping, Pins, Workload, predict, search
from phalanx.plan.grid import Grid
from phalanx.plan.memory.peak import memory
from phalanx.plan.question.emit import job_of
from phalanx.plan.search.search import Objective
from phalanx.plan.search.space import Space, heads_allow
from phalanx.plan.workload import Precision, Software

SMALL = Workload(model=PRESETS["llama3-8b"], sequence=8192, global_batch=256)


def workload(preset: str, global_batch: int = 2048) -> Workload:
    return Workload(model=PRESETS[preset], sequence=8192, global_batch=global_batch)


def every_mapping(question: Workload, gpus: int) -> Grid:
    space = Space(question, cluster(f"h100-{gpus}"), gpus, Pins(), "bfloat16")
    return space.grid(space.rows)[1]


@pytest.mark.parametrize(
    ("preset", "gpus"), [("llama3-8b", 64), ("mixtral-8x7b", 32), ("deepseek-v3", 128)]
)
def test_every_enumerated_mapping_fills_the_gpus_and_passes_the_trainers_rules(
    preset: str, gpus: int
) -> None:
    question = Workload(model=PRESETS[preset], sequence=4096, global_batch=256)
    grid = every_mapping(question, gpus)
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
def test_tensor_stays_inside_the_domain(preset: str) -> None:
    question, on = workload(preset), cluster("h100-1024")
    assert search(question, on).best.mapping.tensor <= on.domain_gpus


def test_tensor_leaves_the_domain_where_it_is_pinned_and_pays_for_it() -> None:
    on = cluster("h100-1024")
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
    everything = every_mapping(SMALL, 64)
    assert result.best.memory_bytes == memory(SMALL, everything, Software()).total.min()


SMALL_SPACES = [
    ("llama3-8b", "h100-16", 64, Pins()),
    ("llama3-70b", "h100-64", 64, Pins()),
    ("llama3-70b", "a100-40g-64", 32, Pins(pipeline=8)),
    ("mixtral-8x7b", "h100-16", 32, Pins()),
    ("deepseek-v3", "h100-128", 128, Pins(tensor=1, micro_batch=1)),
]
WAYS: list[tuple[bool, Objective]] = [
    (True, "tokens"),
    (True, "memory"),
    (False, "tokens"),
    (False, "memory"),
]
BOUNDED = [  # every space and every way; their other pairs take their time
    pytest.param(*space, *way, marks=() if 0 in (number, place) else pytest.mark.soak)
    for place, space in enumerate(SMALL_SPACES)
    for number, way in enumerate(WAYS)
]


@pytest.mark.parametrize(("preset", "on", "batch", "pins", "robust", "objective"), BOUNDED)
def test_bounds_leave_out_nothing_that_matters(
    preset: str, on: str, batch: int, pins: Pins, robust: bool, objective: Objective
) -> None:
    question = Workload(model=PRESETS[preset], sequence=4096, global_batch=batch)
    options: dict[str, Any] = {"pins": pins, "robust": robust, "objective": objective}
    quick = search(question, cluster(on), **options)
    whole = search(question, cluster(on), exhaustive=True, **options)
    assert quick.best == whole.best
    assert quick.top == whole.top
    assert quick.pareto == whole.pareto
    assert quick.considered == whole.considered and quick.priced < whole.priced


@settings(max_examples=10, deadline=None)
@given(
    preset=st.sampled_from(["llama3-8b", "llama3-70b", "mixtral-8x7b"]),
    on=st.sampled_from(["a100-40g-32", "h100-64", "v100-64", "mi300x-16"]),
    factor=st.sampled_from([1.1, 1.5, 2.0, 8.0]),
    part=st.sampled_from(["HBM size", "HBM bandwidth", "FLOP/s", "link", "network"]),
)
def test_a_better_device_never_gives_a_worse_plan(
    preset: str, on: str, factor: float, part: str
) -> None:
    after = _chosen(preset, better(cluster(on), part, factor))
    assert after <= _chosen_as_it_is(preset, on) * (1 + 1e-12)


def better(on: Cluster, part: str, factor: float) -> Cluster:
    gpu, link, nic = on.gpu, on.link, on.nic
    if part == "HBM size":
        gpu = structs.replace(gpu, memory_bytes=int(factor * gpu.memory_bytes))
    elif part == "HBM bandwidth":
        gpu = structs.replace(gpu, memory_bandwidth=factor * gpu.memory_bandwidth)
    elif part == "FLOP/s":
        peaks = {kind: factor * flops for kind, flops in gpu.peak_flops.items()}
        gpu = structs.replace(gpu, peak_flops=peaks)
    elif part == "link":
        link = structs.replace(link, link_bandwidth=factor * link.link_bandwidth)
    else:
        nic = structs.replace(nic, bandwidth=factor * nic.bandwidth)
    return structs.replace(on, gpu=gpu, link=link, nic=nic)


@functools.cache
def _chosen_as_it_is(preset: str, on: str) -> float:
    return _chosen(preset, cluster(on))


def _chosen(preset: str, on: Cluster) -> float:
    """The 90th percentile of the chosen step: what a robust choice makes small."""
    question = Workload(model=PRESETS[preset], sequence=2048, global_batch=64)
    precision: Precision = "bfloat16" if "bfloat16" in on.gpu.peak_flops else "float16"
    try:
        return search(question, on, precision=precision).top[0].step_seconds_p90
    except ConfigError:
        return math.inf


def test_a_model_that_cannot_fit_says_the_least_that_would() -> None:
    with pytest.raises(ConfigError, match=r"nothing fits.*GiB.*try about \d+ GPUs"):
        search(workload("llama3-405b", 64), cluster("h100-16"), pins=Pins(offload="none"))


def test_gpus_without_a_valid_mapping_are_refused_with_the_rule() -> None:
    with pytest.raises(ConfigError, match="no mapping is valid"):
        search(workload("llama3-8b", 1), cluster("h100-65536"))


def test_a_mapping_larger_than_the_cluster_is_refused() -> None:
    with pytest.raises(ConfigError, match="exceeds"):
        predict(SMALL, Mapping(tensor=8, data=16), cluster("h100-64"))


@pytest.mark.parametrize("part", [{"window": Window()}, {"attention_softcap": 50.0}])
def test_without_the_ring_a_context_axis_needs_whole_heads(part: dict[str, Any]) -> None:
    plain = PRESETS["llama3-8b"]  # eight key/value heads
    assert heads_allow(plain, context=8, tensor=2)
    composed = structs.replace(plain, **part)
    assert not heads_allow(composed, context=8, tensor=2)
    assert heads_allow(composed, context=4, tensor=2)
