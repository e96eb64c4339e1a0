"""Peaks: exact names only, and figures that belong together."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.hardware import catalogue, count_cuda, lookup


def test_h200_has_its_published_peaks() -> None:
    gpu = lookup("NVIDIA H200")
    assert gpu is not None
    assert gpu.peak_flops["bfloat16"] == pytest.approx(989.4e12)
    assert gpu.peak_flops["fp8"] == pytest.approx(1978.9e12)
    assert gpu.memory_bandwidth == pytest.approx(4.8e12)


@pytest.mark.parametrize(
    "name",
    [
        "Tesla V100-SXM2-32GB",
        "NVIDIA A100-SXM4-40GB",
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H100 PCIe",
        "NVIDIA B200",
        "AMD Instinct MI300X",
        "  nvidia  h200 ",
    ],
)
def test_known_devices_are_found(name: str) -> None:
    assert lookup(name) is not None


@pytest.mark.parametrize(
    "name",
    [
        "",
        "cpu",
        "NVIDIA H100",
        "NVIDIA H200 NVL",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H2000",
    ],
)
def test_an_unknown_device_never_gets_another_ones_peak(name: str) -> None:
    assert lookup(name) is None


def test_no_device_name_is_listed_twice() -> None:
    names = [name.casefold() for gpu in catalogue() for name in gpu.device_names]
    assert len(names) == len(set(names))


def test_narrower_formats_are_never_slower() -> None:
    order = ("float32", "tf32", "float16", "fp8")
    for gpu in catalogue():
        rates = [gpu.peak_flops[kind] for kind in order if kind in gpu.peak_flops]
        assert rates == sorted(rates), gpu.name


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, 3), ("0,2", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), ("0,1,2,3", 3)],
)
def test_devices_are_counted_without_a_driver(
    visible: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_cuda(tmp_path) == expected
