"""Each planted cause on a played profile is named with its evidence; a healthy one has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from phalanx.observe.profile.advice import Advice, SlowCause
from phalanx.observe.profile.advise import advise
from phalanx.observe.profile.profile import AxisTime, HostSync, JobProfile, KernelTime
from phalanx.train.profile.facts import DeviceRates, MemoryFacts
from phalanx.train.profile.power import parse_power
from tests.observe.profile.played import GIB, played_job, played_profile, times

CAPPED = "350.00, 700.00, 349.12, 1215, 1980"  # as nvidia-smi tells it of a card at half its power


def axis(collective: str, calls: float, moved: float, seconds: float, exposed: float) -> AxisTime:
    return AxisTime(
        axis="data",
        collective=collective,
        calls=calls,
        bytes=moved,
        seconds=seconds,
        exposed_seconds=exposed,
    )


def slow_loader() -> JobProfile:
    return played_profile(
        times=times(0.1, data=0.028),
        synthetic=times(0.07),
        kinds={"matmul": 0.07, "data wait": 0.03},
    )


def host_sync() -> JobProfile:
    syncs = [
        HostSync(where="probe.py(12): after_step", calls=1.0),
        HostSync(where="phalanx/train/trainer.py(344): outcome", calls=1.0),
    ]
    return played_profile(kinds={"matmul": 0.085, "host sync": 0.015}, syncs=syncs)


def tiny_buckets() -> JobProfile:
    job = played_job(
        parallel__zero=0, parallel__ddp_bucket_mb=0.1, parallel__reduce_dtype="compute"
    )
    return played_profile(job, axes=[axis("allreduce", 400, 400e5, 0.03, 0.012)])


def fp32_matmul() -> JobProfile:
    job = played_job(precision__compute="float32")
    return played_profile(job, matmul_formats={"float32": 0.06})


def too_much_recompute() -> JobProfile:
    return played_profile(played_job(memory__recompute="full"), recomputed_seconds=0.02)


def small_micro_batch() -> JobProfile:
    job = played_job(train__micro_batch=1, data__sequence=512, train__global_batch=32)
    return played_profile(
        job,
        kinds={"matmul": 0.06, "launch gap": 0.04},
        kernels=[
            KernelTime(
                name="nvjet",
                kind="matmul",
                shapes="",
                number_format="bfloat16",
                calls=64,
                seconds=0.06,
                flops=200e12 * 0.06,
                bytes=1e9,
            )
        ],
    )


def power_cap() -> JobProfile:
    return played_profile(power=parse_power(CAPPED))


def fragmentation() -> JobProfile:
    held = MemoryFacts(
        limit_bytes=140 * GIB,
        state={},
        peak_bytes=60 * GIB,
        reserved_bytes=100 * GIB,
        allocator="expandable_segments:False",
    )
    return played_profile(memory=held)


PLANTED: dict[SlowCause, Callable[[], JobProfile]] = {
    SlowCause.SLOW_LOADER: slow_loader,
    SlowCause.HOST_SYNC: host_sync,
    SlowCause.TINY_BUCKETS: tiny_buckets,
    SlowCause.FP32_MATMUL: fp32_matmul,
    SlowCause.RECOMPUTE: too_much_recompute,
    SlowCause.SMALL_MICRO_BATCH: small_micro_batch,
    SlowCause.POWER_CAP: power_cap,
    SlowCause.FRAGMENTATION: fragmentation,
}


@pytest.mark.parametrize("cause", PLANTED)
def test_the_planted_cause_is_named_alone(cause: SlowCause) -> None:
    (advice,) = advise(PLANTED[cause]())
    assert advice.cause is cause
    assert advice.evidence
    assert 0 <= advice.gain < 1


def test_a_healthy_profile_gets_no_advice() -> None:
    assert advise(played_profile()) == []


def only(profile: JobProfile) -> Advice:
    (advice,) = advise(profile)
    return advice


def test_what_is_advised_says_setting_value_and_gain() -> None:
    assert only(slow_loader()).gain == pytest.approx(0.3)
    assert only(host_sync()).evidence == ["1 a step at probe.py(12): after_step"]
    buckets = only(tiny_buckets())
    assert (buckets.setting, buckets.value) == ("parallel.ddp_bucket_mb", "25")
    assert "400 reductions a step of 97.7 KiB" in buckets.title
    assert only(fp32_matmul()).gain == pytest.approx(0.6 * (1 - 3 / 7))
    again = only(too_much_recompute())
    assert (again.setting, again.value) == ("memory.recompute", "none")
    assert again.gain == pytest.approx(0.2)
    larger = only(small_micro_batch())
    assert (larger.setting, larger.value) == ("train.micro_batch", "32")
    assert only(power_cap()).command == "phalanx doctor node --only gpu.power"
    assert "40 GiB" in only(fragmentation()).title


def limited(profile: JobProfile) -> JobProfile:
    """The same on a device that is full already."""
    return structs.replace(
        profile, memory=structs.replace(profile.memory, limit_bytes=profile.memory.peak_bytes)
    )


@pytest.mark.parametrize("planted", [too_much_recompute, small_micro_batch])
def test_nothing_is_advised_that_memory_does_not_hold(planted: Callable[[], JobProfile]) -> None:
    assert advise(limited(planted())) == []


UNTOUCHED: dict[str, tuple[Callable[[], JobProfile], dict[str, Any]]] = {
    "a loader within the noise": (slow_loader, {"synthetic": times(0.095)}),
    "steps that differ more than that": (slow_loader, {"times": times(0.1, spread=0.2)}),
    "syncs that leave no gap": (host_sync, {"kinds": {"matmul": 0.1}}),
    "only the wait of the loop itself": (
        host_sync,
        {"syncs": [HostSync(where="phalanx/train/trainer.py(344): outcome", calls=1.0)]},
    ),
    "few reductions": (tiny_buckets, {"axes": [axis("allreduce", 3, 400e5, 0.03, 0.012)]}),
    "a device no faster in 16 bits": (
        fp32_matmul,
        {"rates": DeviceRates({"float32": 3e12, "bfloat16": 3e12}, 4e12)},
    ),
    "the default power limit": (
        power_cap,
        {"power": parse_power("700.00, 700.00, 699.12, 1515, 1980")},
    ),
}


@pytest.mark.parametrize("case", UNTOUCHED)
def test_what_is_no_cause_is_not_named(case: str) -> None:
    planted, fields = UNTOUCHED[case]
    assert advise(structs.replace(planted(), **fields)) == []


def test_exposed_communication_names_its_setting_by_axis() -> None:
    gathers = played_profile(axes=[axis("_allgather_base", 16, 1e9, 0.02, 0.006)])
    prefetch = only(gathers)
    assert prefetch.title == "FSDP prefetch 1 → 2: exposed gathers 6%"
    assert prefetch.setting == "parallel.prefetch_layers"
    sums = played_profile(axes=[axis("_reduce_scatter_base", 16, 1e9, 0.02, 0.006)])
    assert only(sums).setting == "parallel.reduce_dtype"
    tensor = structs.replace(gathers.axes[0], axis="tensor", collective="_reduce")
    job = played_job(parallel__reduce_dtype="compute")
    assert only(played_profile(job, axes=[tensor])).setting == "parallel.async_tensor"


def test_advice_is_ranked_by_its_gain() -> None:
    both = structs.replace(host_sync(), recompiles=2, graphs=5)
    assert [a.cause for a in advise(structs.replace(both, power=parse_power(CAPPED)))] == [
        SlowCause.POWER_CAP,
        SlowCause.HOST_SYNC,
        SlowCause.RECOMPILES,
    ]


@pytest.mark.parametrize("text", ["", "[N/A], 700, 1, 2, 3", "1, 2"])
def test_a_card_that_does_not_tell_its_power_is_unknown(text: str) -> None:
    assert parse_power(text) is None
