"""Peak rates of GPUs, by the name that torch gives the device."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources

from msgspec import Struct


class Gpu(Struct, frozen=True):
    """One model of GPU. ``peak_flops`` is dense FLOP/s by precision."""

    name: str
    device_names: tuple[str, ...]
    peak_flops: dict[str, float]  # "float32", "tf32", "bfloat16", "float16", "fp8"
    memory_bytes: int
    memory_bandwidth: float  # bytes per second


@cache
def catalogue() -> tuple[Gpu, ...]:
    """Every GPU of the data file."""
    text = resources.files("phalanx.hardware").joinpath("gpus.toml").read_text(encoding="utf-8")
    return tuple(
        Gpu(
            name=entry["name"],
            device_names=tuple(entry["device_names"]),
            peak_flops={kind: tera * 1e12 for kind, tera in entry["tflops"].items()},
            memory_bytes=entry["memory_gib"] * 2**30,
            memory_bandwidth=entry["memory_gb_per_second"] * 1e9,
        )
        for entry in tomllib.loads(text)["gpu"]
    )


def lookup(device_name: str) -> Gpu | None:
    """The GPU of this exact device name; None (an unknown peak) for any other."""
    wanted = " ".join(device_name.split()).casefold()
    for gpu in catalogue():
        if any(name.casefold() == wanted for name in gpu.device_names):
            return gpu
    return None
