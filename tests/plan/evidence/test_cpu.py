"""Constants of CPU cores are found again in the steps that they predict."""

from __future__ import annotations

import pytest
from msgspec import structs

from phalanx.config import ConfigError, job_from_table, resolve
from phalanx.hardware import ClusterFile, make_cluster
from phalanx.plan import Mapping, Workload, mapping_of, predict, shipped, workload_of
from phalanx.plan.cost.collectives import LL_SHARE, RING_LL
from phalanx.plan.evidence.cpu import (
    ATTENTION,
    LEAST_KERNEL_SECONDS,
    PRODUCTS,
    MeasuredLink,
    MeasuredStep,
    cpu_constants,
)

ON = make_cluster("cpu-2", ClusterFile(gpu="cpu", gpus=2, gpus_per_node=1, domain_gpus=2))
BASE = shipped("cpu")


def workload(micro_batch: int) -> tuple[Workload, Mapping]:
    table = {
        "model": {"preset": "tiny"},
        "parallel": {"data": 2, "zero": 0},
        "precision": {"compute": "float32"},
        "train": {"global_batch": 16, "micro_batch": micro_batch, "device": "cpu"},
    }
    job = resolve(job_from_table(table), 2)
    return workload_of(job), mapping_of(job)


def link_of(bandwidth: float, start: float) -> MeasuredLink:
    return MeasuredLink(
        small_bytes=4096,
        small_seconds=start + 2048 / (LL_SHARE * bandwidth),
        large_bytes=1 << 23,
        large_seconds=start + 2048 / (LL_SHARE * bandwidth) + ((1 << 22) - 2048) / bandwidth,
    )


def test_what_made_the_steps_is_found_in_them() -> None:
    bandwidth, start = 1.5e9, 300e-6
    true = structs.replace(
        BASE,
        matmul=BASE.matmul | {PRODUCTS: 0.4},
        attention=BASE.attention | {ATTENTION: 0.23},
        kernel_seconds=33e-6,
        link=bandwidth / (ON.link.bandwidth * ON.link.efficiency),
        latency=start / (RING_LL[0] + RING_LL[1]),
    )
    at_once = structs.replace(true, kernel_seconds=0.0)
    steps = tuple(
        MeasuredStep(
            *one,
            predict(*one, ON, constants=true).step_seconds,
            predict(*one, ON, constants=at_once).parts["attention"],
        )
        for one in (workload(4), workload(1))
    )
    found = cpu_constants((steps[0], steps[1]), link_of(bandwidth, start), ON, BASE)
    assert found.matmul[PRODUCTS] == pytest.approx(0.4, rel=1e-3)
    assert found.attention[ATTENTION] == pytest.approx(0.23, rel=1e-3)
    assert found.kernel_seconds == pytest.approx(33e-6, rel=1e-3)
    assert found.link == pytest.approx(true.link) and found.latency == pytest.approx(true.latency)


def test_small_products_that_are_quick_do_not_make_starting_free() -> None:
    at_once = structs.replace(BASE, kernel_seconds=0.0)
    priced = [predict(*workload(batch), ON, constants=at_once) for batch in (4, 1)]
    steps = [
        MeasuredStep(*workload(batch), share * found.step_seconds, found.parts["attention"])
        for batch, share, found in zip((4, 1), (1.0, 0.9), priced, strict=True)
    ]
    found = cpu_constants((steps[0], steps[1]), link_of(1e9, 1e-4), ON, BASE)
    assert found.kernel_seconds == LEAST_KERNEL_SECONDS
    again = predict(*workload(4), ON, constants=found).step_seconds
    assert again == pytest.approx(steps[0].seconds, rel=1e-3)


def test_two_steps_that_say_the_same_are_refused() -> None:
    same = MeasuredStep(*workload(4), 1.0, 0.2)
    with pytest.raises(ConfigError, match="two sizes of micro-batch"):
        cpu_constants((same, same), link_of(1e9, 1e-4), ON, BASE)


def test_cores_start_kernels_later_than_gpus_and_hide_nothing() -> None:
    assert BASE.kernel_seconds > shipped().kernel_seconds and BASE.hidden == 0
    assert BASE.latency > 1 == shipped().latency
