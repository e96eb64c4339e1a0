"""The catalogue against itself: figures that follow from others, and sums that vendors publish."""

from __future__ import annotations

import pytest

from phalanx.hardware import Gpu, catalogue, gpu, links, nics, nodes, pcie_bandwidth

# 16-bit tensor FLOPs of one multiprocessor in one clock, from the architecture whitepapers.
FLOPS_PER_CLOCK = {
    "volta": 1024,
    "ampere": 2048,
    "hopper": 4096,
    "blackwell": 8192,
    "cdna2": 1024,
    "cdna3": 2048,
    "cdna4": 4096,
}
# Highest clock in GHz of each card, from its data sheet.
CLOCKS = {
    "v100-16g": 1.53,
    "v100": 1.53,
    "v100-pcie": 1.38,
    "a100-40g": 1.41,
    "a100": 1.41,
    "a100-pcie": 1.41,
    "a800": 1.41,
    "h100": 1.83,
    "h100-pcie": 1.62,
    "h800": 1.83,
    "h200": 1.83,
    "mi250x": 1.7,
    "mi300x": 2.1,
    "mi355x": 2.4,
}
# HBM stacks of a device and Gbit/s of one of their 1024 pins.
STACKS = {
    "v100": (4, 1.75),
    "a100-40g": (5, 2.43),
    "a100": (5, 3.19),
    "h100": (5, 5.23),
    "h200": (6, 6.25),
    "b200": (8, 7.5),
    "gb200": (8, 7.8),
    "mi250x": (4, 3.2),
    "mi300x": (8, 5.2),
    "mi355x": (8, 7.8),
}


def half(one: Gpu) -> float:
    return one.peak_flops.get("bfloat16", one.peak_flops.get("float16", 0.0))


@pytest.mark.parametrize("key", CLOCKS)
def test_peak_is_multiprocessors_times_their_width_times_the_clock(key: str) -> None:
    one = gpu(key)
    expected = one.sms * FLOPS_PER_CLOCK[one.family] * CLOCKS[key] * 1e9
    assert half(one) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("key", STACKS)
def test_memory_bandwidth_is_that_of_its_stacks(key: str) -> None:
    stacks, gigabits = STACKS[key]
    assert gpu(key).memory_bandwidth == pytest.approx(stacks * 1024 / 8 * gigabits * 1e9, rel=0.03)


@pytest.mark.parametrize("one", catalogue(), ids=lambda one: one.key)
def test_narrower_formats_double_the_rate_and_nothing_is_sparse(one: Gpu) -> None:
    peaks = one.peak_flops
    if "bfloat16" in peaks and "float16" in peaks:
        assert peaks["float16"] == peaks["bfloat16"]
    if "tf32" in peaks:
        assert peaks["tf32"] == pytest.approx(half(one) / 2, rel=0.03)
    if "fp8" in peaks:
        assert peaks["fp8"] == pytest.approx(2 * half(one), rel=0.01)
    if "fp4" in peaks:  # Blackwell Ultra has half as many units again for it
        assert 1.99 <= peaks["fp4"] / peaks["fp8"] <= 3
    if one.family in FLOPS_PER_CLOCK:
        clock = half(one) / (one.sms * FLOPS_PER_CLOCK[one.family])
        assert 1.2e9 < clock < 2.6e9, "a sparse figure would need twice the clock"


@pytest.mark.parametrize("one", catalogue(), ids=lambda one: one.key)
def test_every_device_stands_in_a_known_server_that_can_feed_it(one: Gpu) -> None:
    node = nodes()[one.node]
    assert node.watts > node.gpus * node.gpu_watts
    assert node.link in links() and node.nic in nics()
    assert node.host_memory_bytes > 0 and node.host_memory_bandwidth > 0
    assert node.domain_gpus >= node.gpus
    drives = node.drives
    assert drives.read_bandwidth >= drives.write_bandwidth >= 0
    # Memory is written and read through the caches faster than any link delivers.
    assert one.memory_bandwidth > links()[node.link].bandwidth


@pytest.mark.parametrize(
    ("figure", "total"),
    [
        ("DGX A100 sparse fp16 PFLOP/s", 5.0),
        ("DGX H100 sparse fp8 PFLOP/s", 32.0),
        ("DGX B200 sparse fp4 PFLOP/s", 144.0),
        ("GB200 NVL72 sparse fp4 PFLOP/s", 1440.0),
        ("GB300 NVL72 dense fp4 PFLOP/s", 1080.0),
        ("GB200 NVL72 HBM TB", 13.4),
        ("GB200 NVL72 HBM TB/s", 576.0),
        ("GB200 NVL72 NVLink TB/s", 130.0),
        ("MI300X platform bf16 PFLOP/s", 10.5),
        ("MI300X platform HBM TB", 1.5),
    ],
)
def test_sums_are_those_of_the_data_sheets(figure: str, total: float) -> None:
    a100, h100, b200, gb200 = (gpu(name) for name in ("a100", "h100", "b200", "gb200"))
    gb300, mi300x = gpu("gb300"), gpu("mi300x")
    found = {
        "DGX A100 sparse fp16 PFLOP/s": 8 * 2 * a100.peak_flops["float16"] / 1e15,
        "DGX H100 sparse fp8 PFLOP/s": 8 * 2 * h100.peak_flops["fp8"] / 1e15,
        "DGX B200 sparse fp4 PFLOP/s": 8 * 2 * b200.peak_flops["fp4"] / 1e15,
        "GB200 NVL72 sparse fp4 PFLOP/s": 72 * 2 * gb200.peak_flops["fp4"] / 1e15,
        "GB300 NVL72 dense fp4 PFLOP/s": 72 * gb300.peak_flops["fp4"] / 1e15,
        "GB200 NVL72 HBM TB": 72 * gb200.memory_bytes / 2**30 / 1e3,
        "GB200 NVL72 HBM TB/s": 72 * gb200.memory_bandwidth / 1e12,
        "GB200 NVL72 NVLink TB/s": 72 * 2 * links()["nvlink5"].bandwidth / 1e12,
        "MI300X platform bf16 PFLOP/s": 8 * mi300x.peak_flops["bfloat16"] / 1e15,
        "MI300X platform HBM TB": 8 * mi300x.memory_bytes / 2**30 / 1e3,
    }
    assert found[figure] == pytest.approx(total, rel=0.03)


@pytest.mark.parametrize(
    ("link", "both_ways"),
    [
        ("nvlink2", 300),
        ("nvlink3", 600),
        ("nvlink3-a800", 400),
        ("nvlink4", 900),
        ("nvlink4-h800", 400),
        ("nvlink5", 1800),
        ("xgmi-mi300x", 896),
        ("xgmi-mi355x", 1075),
    ],
)
def test_links_add_up_to_the_figure_that_vendors_print(link: str, both_ways: float) -> None:
    assert 2 * links()[link].bandwidth == pytest.approx(both_ways * 1e9, rel=0.001)


@pytest.mark.parametrize(
    ("generation", "gigabytes"), [(3, 15.75), (4, 31.5), (5, 63.0), (6, 121.0)]
)
def test_pcie_is_computed(generation: int, gigabytes: float) -> None:
    assert pcie_bandwidth(generation) == pytest.approx(gigabytes * 1e9, rel=0.001)


@pytest.mark.parametrize(
    ("node", "gigabytes", "terabytes"),
    [("dgx-a100", 409.6, 30.7), ("dgx-h100", 614.4, 30.7), ("frontier", 204.8, 3.84)],
)
def test_host_memory_and_drives_follow_from_their_parts(
    node: str, gigabytes: float, terabytes: float
) -> None:
    found = nodes()[node]
    assert found.host_memory_bandwidth == pytest.approx(gigabytes * 1e9)
    assert found.drives.capacity_bytes == pytest.approx(terabytes * 1e12, rel=0.01)


def test_frontier_has_the_dies_of_its_nodes() -> None:
    from phalanx.hardware import cluster

    assert cluster("frontier").nodes == 9408
