"""GPUs by the name that a person types or that torch gives the device."""

from __future__ import annotations

import os
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from phalanx.config import ConfigError
from phalanx.config.toml_text import parse_toml
from phalanx.hardware.tables import find, table

FILE_VARIABLE = "PHALANX_GPU_CATALOGUE"  # a file with GPUs that ours has not


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


class GpuEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU as a file describes it."""

    name: str
    keys: tuple[str, ...]
    device_names: tuple[str, ...]
    family: str
    node: str
    tflops: dict[str, float]
    memory_gib: int
    memory_gb_per_second: float
    l2_mib: int
    sms: int
    tdp_watts: float
    dollars_per_hour: float


class GpuFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A site's own GPUs."""

    gpu: tuple[GpuEntry, ...]


@cache
def catalogue() -> tuple[Gpu, ...]:
    """Every GPU of the data file, and before them those of the site's own file."""
    path = os.environ.get(FILE_VARIABLE)
    own = read_gpus(Path(path)) if path else ()
    return own + _gpus(table("gpus.toml")["gpu"])


def read_gpus(path: Path) -> tuple[Gpu, ...]:
    """GPUs of a site's file; ConfigError names what is wrong with it."""
    try:
        entries = parse_toml(path.read_text(encoding="utf-8"))
        msgspec.convert(entries, GpuFile)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        fix = "name a TOML file of [[gpu]] entries"
        raise ConfigError(FILE_VARIABLE, str(path), why, fix) from None
    except msgspec.ValidationError as error:
        rule, _, where = str(error).partition(" - at `$.")
        fix = "write each [[gpu]] as phalanx/hardware/gpus.toml does"
        raise ConfigError(where.rstrip("`") or "gpu", str(path), rule, fix) from None
    empty = next((entry for entry in entries["gpu"] if not entry["keys"]), None)
    if empty is not None:
        fix = 'e.g. keys = ["x900"]'
        raise ConfigError("gpu.keys", "[]", f"{empty['name']} needs a short name", fix)
    return _gpus(entries["gpu"])


def _gpus(entries: list[dict[str, Any]]) -> tuple[Gpu, ...]:
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
        for entry in entries
    )


@cache
def gpus_by_key() -> dict[str, Gpu]:
    """Every short name with its GPU."""
    gpu_of: dict[str, Gpu] = {}
    for each in catalogue():  # the site's own are first
        for key in each.keys:
            gpu_of.setdefault(key, each)
    return gpu_of


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
