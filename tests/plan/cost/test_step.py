"""The step model: never above peak, and better hardware is never slower."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from phalanx.config import PRESETS
from phalanx.hardware import Cluster, cluster
from phalanx.plan import Mapping, Workload, predict
from phalanx.plan.cost.constants import shipped
from phalanx.plan.cost.matmul import matmul_seconds
from phalanx.plan.cost.predict import Prediction
from phalanx.plan.cost.step import step_time
from phalanx.plan.grid import grid_of
from phalanx.plan.machine import machine_of
from phalanx.plan.workload import Software

MODELS = ("llama3-8b", "llama3-70b", "mixtral-8x7b", "deepseek-v3")


@st.composite
def cases(draw: st.DrawFn) -> tuple[Workload, Mapping, str]:
    preset = draw(st.sampled_from(MODELS))
    model = PRESETS[preset]
    pipeline = draw(st.sampled_from([1, 2, 4, 8]))
    expert = draw(st.sampled_from([1, 4, 8])) if model.moe else 1
    interleaved = pipeline > 1 and draw(st.booleans())
    mapping = Mapping(
        tensor=draw(st.sampled_from([1, 2, 8])),
        pipeline=pipeline,
        data=draw(st.sampled_from([8, 32])),
        context=draw(st.sampled_from([1, 2])),
        expert=expert,
        zero=draw(st.sampled_from([0, 1, 2, 3])),
        micro_batch=draw(st.sampled_from([1, 4])),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        schedule="interleaved" if interleaved else "1f1b",
        virtual_stages=2 if interleaved else 1,
        precision=draw(st.sampled_from(["bfloat16", "fp8"])),
    )
    workload = Workload(model=model, sequence=4096, global_batch=1024)
    return workload, mapping, draw(st.sampled_from(["a100", "h100", "gb200"]))


def faster(on: Cluster, part: str) -> Cluster:
    if part == "network":
        return structs.replace(on, nic=structs.replace(on.nic, bandwidth=2 * on.nic.bandwidth))
    if part == "link":
        link = structs.replace(on.link, link_bandwidth=2 * on.link.link_bandwidth)
        return structs.replace(on, link=link)
    gpu = on.gpu
    if part == "memory":
        gpu = structs.replace(gpu, memory_bandwidth=2 * gpu.memory_bandwidth)
    else:
        peaks = {kind: 2 * flops for kind, flops in gpu.peak_flops.items()}
        gpu = structs.replace(gpu, peak_flops=peaks)
    return structs.replace(on, gpu=gpu)


@settings(max_examples=60, deadline=None)
@given(case=cases(), part=st.sampled_from(["network", "link", "memory", "flops"]))
def test_better_hardware_is_never_slower(case: tuple[Workload, Mapping, str], part: str) -> None:
    workload, mapping, name = case
    on = cluster(f"{name}-{mapping.gpus}")
    before = predict(workload, mapping, on).step_seconds
    assert predict(workload, mapping, faster(on, part)).step_seconds <= before * (1 + 1e-12)


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_a_step_is_below_peak_the_sum_of_its_parts_and_the_same_again(
    case: tuple[Workload, Mapping, str],
) -> None:
    workload, mapping, name = case
    on = cluster(f"{name}-{mapping.gpus}")
    found = predict(workload, mapping, on)
    assert 0 < found.mfu < 1
    assert sum(found.parts.values()) == pytest.approx(found.step_seconds)
    assert all(seconds >= 0 for seconds in found.parts.values())
    assert found.step_seconds_low < found.step_seconds < found.step_seconds_high
    assert predict(workload, mapping, on) == found
    assert len(found.memory) == mapping.pipeline


def parts(workload: Workload, mapping: Mapping, software: Software) -> dict[str, float]:
    machine = machine_of(cluster(f"h100-{mapping.gpus}"), mapping.gpus)
    time = step_time(workload, grid_of([mapping]), machine, shipped(), software)
    return {name: float(seconds[0]) for name, seconds in time.parts.items()}


def test_the_bubble_is_that_of_the_textbook() -> None:
    workload = Workload(model=PRESETS["gpt3-175b"], sequence=2048, global_batch=64)
    one = Mapping(tensor=8, pipeline=8, zero=0, micro_batch=1)
    found = parts(workload, one, Software())
    busy = sum(found[n] for n in ("matmul", "attention", "elementwise", "tensor", "pipeline"))
    # p - 1 of m + p - 1; the head makes one stage a little slower than the mean.
    assert found["bubble"] / busy == pytest.approx(7 / 64, rel=0.08)
    looped = structs.replace(one, schedule="interleaved", virtual_stages=4)
    assert parts(workload, looped, Software())["bubble"] == pytest.approx(
        found["bubble"] / 4, rel=0.05
    )
    folded = structs.replace(one, schedule="zero-bubble", virtual_stages=2)
    assert parts(workload, folded, Software())["bubble"] == 0


def test_fused_experts_take_less_than_one_product_after_the_other() -> None:
    mapping = Mapping(data=8, expert=8, zero=1, micro_batch=4, precision="mxfp8")
    workload = Workload(model=PRESETS["qwen3-moe-30b-a3b"], sequence=4096, global_batch=512)

    def price(fused: bool) -> dict[str, float]:
        software = Software(fused_experts=fused)
        on = machine_of(cluster("gb200-4608"), mapping.gpus)
        time = step_time(workload, grid_of([mapping]), on, shipped(), software)
        return {name: float(seconds[0]) for name, seconds in time.parts.items()}

    apart, together = price(False), price(True)
    assert together["matmul"] < apart["matmul"]
    assert together["elementwise"] < apart["elementwise"]
    assert together["expert"] == apart["expert"]


def test_products_that_the_host_launches_for_each_expert_take_no_less_than_that() -> None:
    """Each of 32 ranks has a quarter of the experts, with four times the rows, of each of 8."""
    model = PRESETS["qwen3-moe-30b-a3b"]
    workload = Workload(model=model, sequence=4096, global_batch=512, routing_skew=0.0)
    constants = structs.replace(shipped(), boost=0.0)
    mapping = Mapping(tensor=4, data=8, expert=32, zero=1)

    def products(expert: int, together: bool, launch: float) -> float:
        """Of all matrix products in one block and micro-batch."""
        one = structs.replace(mapping, expert=expert)
        on = machine_of(cluster("h100-64"), one.gpus)
        own = structs.replace(constants, expert_launch_seconds=launch)
        software = Software(experts_together=together)
        time = step_time(workload, grid_of([one]), on, own, software)
        return float(time.parts["matmul"][0]) / model.layers / one.micro_batches(512)

    # Two products forward and four backward, of 16 experts or of 4.
    slow = 1e-3
    for expert, experts in ((8, 16), (32, 4)):
        longer = products(expert, False, 2 * slow) - products(expert, False, slow)
        assert longer == pytest.approx(6 * experts * slow, rel=1e-6)
        assert products(expert, True, slow) == products(expert, True, 0.0)
    # What takes longer than its launch anyway is no slower.
    assert products(32, False, 1e-6) == products(32, True, 0.0)
    few, many = (products(expert, False, 33e-6) for expert in (32, 8))
    assert many / products(8, True, 0.0) > few / products(32, True, 0.0)


def test_a_host_that_launches_each_experts_products_can_be_what_a_step_waits_for() -> None:
    model = PRESETS["qwen3-moe-30b-a3b"]
    workload = Workload(model=model, sequence=64, global_batch=64, routing_skew=0.0)
    mapping = Mapping(data=8, expert=8, zero=1)
    on = machine_of(cluster("h100-64"), mapping.gpus)

    def seconds(together: bool) -> float:
        software = Software(experts_together=together)
        time = step_time(workload, grid_of([mapping]), on, shipped(), software)
        return float(time.seconds[0])

    launches = 8 * model.layers * 6 * 16 * shipped().expert_launch_seconds
    assert seconds(False) > launches > seconds(True) / 2


def test_selective_recompute_does_not_route_again() -> None:
    workload = Workload(model=PRESETS["mixtral-8x7b"], sequence=4096, global_batch=64)
    mapping = Mapping(data=8, expert=8, zero=1, recompute="selective")
    on = machine_of(cluster("h100-64"), mapping.gpus)

    def again(level: Literal["selective", "full"], seconds: float) -> float:
        grid = grid_of([structs.replace(mapping, recompute=level)])
        constants = structs.replace(shipped(), expert_seconds=seconds, boost=0.0)
        time = step_time(workload, grid, on, constants, Software())
        return float(time.parts["recompute"][0])

    assert again("selective", 1.0) == pytest.approx(again("selective", 0.0))
    assert again("full", 1.0) - again("full", 0.0) == pytest.approx(8 * 32 * 1.0)


def test_how_many_tokens_there_are_does_not_misalign_a_product() -> None:
    """What must be a multiple of 64 is the length of rows in memory: the weights' sides."""

    def seconds(sequence: int, ffn: int) -> float:
        model = structs.replace(PRESETS["llama3-8b"], ffn=ffn)
        workload = Workload(model=model, sequence=sequence, global_batch=64)
        return parts(workload, Mapping(data=8, zero=1), Software())["matmul"]

    assert seconds(8191, 14336) == pytest.approx(seconds(8192, 14336), rel=1e-3)
    assert seconds(8192, 14337) > 1.1 * seconds(8192, 14336)


def test_tiles_of_products_in_one_kernel_share_waves() -> None:
    on, width = machine_of(cluster("h100-64"), 8), np.array([512.0])
    alone = matmul_seconds(width, width, width, on, "bfloat16", shipped())
    many = matmul_seconds(width, width, width, on, "bfloat16", shipped(), together=64.0)
    assert alone < many < 64 * alone


def test_imbalance_slows_experts_and_forced_balance_does_not() -> None:
    mapping = Mapping(data=32, expert=32, zero=1)
    even = Workload(
        model=PRESETS["qwen3-moe-30b-a3b"], sequence=4096, global_batch=512, routing_skew=0.0
    )
    uneven = structs.replace(even, routing_skew=0.6)
    assert parts(uneven, mapping, Software())["matmul"] > parts(even, mapping, Software())["matmul"]


def test_full_recompute_repeats_a_forward() -> None:
    workload = Workload(model=PRESETS["llama3-8b"], sequence=4096, global_batch=64)
    mapping = Mapping(data=8, zero=3, recompute="full")
    found = parts(workload, mapping, Software())
    compute = found["matmul"] + found["attention"] + found["elementwise"]
    assert found["recompute"] == pytest.approx(compute / 3, rel=0.15)


def test_small_work_waits_for_the_host_that_launches_it_and_large_work_does_not() -> None:
    def times(preset: str, sequence: int, kernels: float) -> tuple[float, float]:
        """A step with hosts that need no time for a launch, and with those that do."""
        workload = Workload(model=PRESETS[preset], sequence=sequence, global_batch=64)
        mapping = Mapping(data=8, zero=1, micro_batch=1)
        quick = structs.replace(shipped(), launch_seconds=0.0)
        slow = structs.replace(shipped(), launch_seconds=kernels)
        return tuple(
            predict(workload, mapping, cluster("h100-8"), constants=one).step_seconds
            for one in (quick, slow)
        )  # type: ignore[return-value]

    small, launched = times("tiny", 128, 1e-5)
    blocks, micro_batches, least_kernels = 4, 8, 3 * 12
    assert launched > max(1.3 * small, blocks * micro_batches * least_kernels * 1e-5)
    plain, beside = times("llama3-8b", 8192, 1e-5)
    assert plain == beside


def test_a_full_device_slows_steps_and_one_that_cannot_hold_them_says_so() -> None:
    on = cluster("h100-16")
    workload = Workload(model=PRESETS["llama3-8b"], sequence=8192, global_batch=64)
    mapping = Mapping(data=16, zero=1, recompute="full")
    fixed = Software(expandable_segments=False)

    def at(memory_bytes: float, software: Software = fixed) -> Prediction:
        gpu = structs.replace(on.gpu, memory_bytes=int(memory_bytes))
        there = structs.replace(on, gpu=gpu)
        return predict(workload, mapping, there, software=software)

    room = at(200e9)
    assert "allocator" not in room.parts and room.needed_bytes < room.memory_bytes
    spare = room.memory_bytes - room.needed_bytes
    assert at(room.needed_bytes + 0.5 * spare).step_seconds == room.step_seconds
    pressed = at(room.needed_bytes + 0.02 * spare)
    assert 1.08 < pressed.step_seconds / room.step_seconds < 1.16
    assert sum(pressed.parts.values()) == pytest.approx(pressed.step_seconds)
    grows = at(room.needed_bytes + 0.02 * spare, Software())
    assert "allocator" not in grows.parts and grows.fits and not pressed.fits
    assert at(0.9 * room.needed_bytes).step_seconds == room.step_seconds
