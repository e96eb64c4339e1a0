"""GPUs by the name that a person types or that torch gives the device."""

from __future__ import annotations

from functools import cache

from msgspec import Struct

from phalanx.hardware.tables import find, table


class Gpu(Struct, frozen=True, kw_only=True):
    """One model of GPU. ``peak_flops`` is dense FLOP/s by precision."""

    key: str  # the short name: "h100"
    name: str
    keys: tuple[str, ...]  # every short name
    device_names: tuple[str, ...]
    family: str  # "volta", "ampere", "hopper", "blackwell", "cdna2", "cdna3", "cdna4", "tpu"
    node: str  # the usual server around it
    peak_flops: dict[str, float]  # "float32", "tf32", "bfloat16", "float16", "fp8", "fp4"
    memory_bytes: int
    memory_bandwidth: float  # bytes per second
    l2_bytes: int
    sms: int  # multiprocessors, or compute units
    tdp_watts: float
    price_per_hour: float  # dollars


@cache
def catalogue() -> tuple[Gpu, ...]:
    """Every GPU of the data file."""
    return tuple(
        Gpu(
            key=entry["keys"][0],
            name=entry["name"],
            keys=tuple(entry["keys"]),
            device_names=tuple(entry["device_names"]),
            family=entry["family"],
            node=entry["node"],
            peak_flops={kind: tera * 1e12 for kind, tera in entry["tflops"].items()},
            memory_bytes=entry["memory_gib"] * 2**30,
            memory_bandwidth=entry["memory_gb_per_second"] * 1e9,
            l2_bytes=entry["l2_mib"] * 2**20,
            sms=entry["sms"],
            tdp_watts=float(entry["tdp_watts"]),
            price_per_hour=float(entry["dollars_per_hour"]),
        )
        for entry in table("gpus.toml")["gpu"]
    )


@cache
def gpus_by_key() -> dict[str, Gpu]:
    """Every short name with its GPU."""
    return {key: gpu for gpu in catalogue() for key in gpu.keys}


def gpu(name: str) -> Gpu:
    """The GPU of a short name ("h100") or a device name; an unknown one raises ConfigError."""
    return lookup(name) or find(gpus_by_key(), name, "gpu")


def lookup(device_name: str) -> Gpu | None:
    """The GPU of this exact device name; None (an unknown peak) for any other."""
    wanted = " ".join(device_name.split()).casefold()
    for gpu in catalogue():
        if any(name.casefold() == wanted for name in gpu.device_names):
            return gpu
    return None
