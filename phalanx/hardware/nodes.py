"""Servers: how GPUs, links and network cards are put together."""

from __future__ import annotations

from functools import cache

from msgspec import Struct

from phalanx.hardware.links import pcie_bandwidth
from phalanx.hardware.tables import table


class Drives(Struct, frozen=True):
    """Local NVMe of a server, all drives together."""

    capacity_bytes: float = 0.0
    read_bandwidth: float = 0.0  # bytes per second
    write_bandwidth: float = 0.0


class NodeType(Struct, frozen=True, kw_only=True):
    """One kind of server."""

    name: str
    gpus: int
    domain_gpus: int  # GPUs that the link joins; a rack's for NVL72
    link: str
    nic: str
    nics_per_gpu: float
    fabric: str
    host_bandwidth: float  # bytes per second between a GPU and its host's memory, one way
    host_memory_bytes: int  # of the whole server
    host_memory_bandwidth: float  # bytes per second, of the whole server
    drives: Drives  # of the whole server
    watts: float  # rated maximum of the whole server, with GPUs of gpu_watts
    gpu_watts: float
    gpus_per_rack: int


@cache
def nodes() -> dict[str, NodeType]:
    """Servers by name."""
    return {
        entry["name"]: NodeType(
            name=entry["name"],
            gpus=entry["gpus"],
            domain_gpus=entry["domain_gpus"],
            link=entry["link"],
            nic=entry["nic"],
            nics_per_gpu=float(entry["nics_per_gpu"]),
            fabric=entry["fabric"],
            host_bandwidth=_host_bandwidth(entry["host_link"]),
            host_memory_bytes=entry["host_memory_gib"] * 2**30,
            host_memory_bandwidth=_memory_bandwidth(entry["host_memory"]),
            drives=_drives(**entry.get("drives", {"count": 0})),
            watts=float(entry["watts"]),
            gpu_watts=float(entry["gpu_watts"]),
            gpus_per_rack=entry["gpus_per_rack"],
        )
        for entry in table("nodes.toml")["node"]
    }


def _host_bandwidth(link: dict[str, float]) -> float:
    if "pcie" in link:
        return pcie_bandwidth(int(link["pcie"]))
    return link["gb_per_second"] * 1e9


def _memory_bandwidth(memory: dict[str, float]) -> float:
    if "gb_per_second" in memory:
        return memory["gb_per_second"] * 1e9
    return memory["channels"] * memory["megatransfers"] * 1e6 * 8


def _drives(
    count: int,
    terabytes: float = 0.0,
    read_gb_per_second: float = 0.0,
    write_gb_per_second: float = 0.0,
) -> Drives:
    return Drives(
        count * terabytes * 1e12,
        count * read_gb_per_second * 1e9,
        count * write_gb_per_second * 1e9,
    )
