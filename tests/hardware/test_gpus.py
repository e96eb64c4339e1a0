"""Peaks: exact names only, and figures that belong together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from phalanx.config import ConfigError
from phalanx.hardware import catalogue, count_cuda, gpus_by_key, lookup
from phalanx.hardware.gpus import GpuEntry
from phalanx.hardware.tables import table


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


OWN = """
[[gpu]]
name = "X900"
keys = ["x900"]
device_names = ["NVIDIA X900"]
family = "blackwell"
node = "dgx-b200"
sms = 100
memory_gib = 288
memory_gb_per_second = 9000
l2_mib = 60
tdp_watts = 1400
dollars_per_hour = 6
tflops = { bfloat16 = 5000.0 }
"""


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "gpus.toml"
    monkeypatch.setenv("PHALANX_GPU_CATALOGUE", str(path))
    for cached in (catalogue, gpus_by_key):
        cached.cache_clear()
    yield path
    for cached in (catalogue, gpus_by_key):
        cached.cache_clear()


def test_a_site_gives_gpus_that_the_catalogue_has_not(own_file: Path) -> None:
    own_file.write_text(OWN)
    found = lookup("NVIDIA X900")
    assert found is not None and found.key == "x900" and found.memory_bytes == 288 << 30
    assert gpus_by_key()["x900"] is found and gpus_by_key()["h100"].name == "H100 SXM"


@pytest.mark.parametrize(
    ("text", "key", "rule"),
    [
        (OWN.replace("sms = 100\n", ""), "gpu[0]", "missing required field `sms`"),
        (OWN + "weight = 3\n", "gpu[0]", "unknown field `weight`"),
        (OWN.replace('["x900"]', "[]"), "gpu.keys", "needs a short name"),
        ("gpu = 3", "gpu", "Expected `array`"),
        ("=", "PHALANX_GPU_CATALOGUE", "Invalid"),
    ],
)
def test_a_wrong_entry_of_a_site_is_refused(text: str, key: str, rule: str, own_file: Path) -> None:
    own_file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        catalogue()
    assert key in str(caught.value) and rule in str(caught.value)


def test_our_own_file_is_one_that_a_site_could_give() -> None:
    entries = [msgspec.convert(entry, GpuEntry) for entry in table("gpus.toml")["gpu"]]
    assert len(entries) > 20
