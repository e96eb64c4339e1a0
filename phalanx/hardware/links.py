"""What joins GPUs: links within a domain, PCIe, network cards and fabrics. Rates are one way."""

from __future__ import annotations

import math
from functools import cache
from typing import Literal

from msgspec import Struct

from phalanx.hardware.tables import find, table

# A collective over PCIe crosses the host's bridges: what NCCL's model allows such a path.
PCIE_COLLECTIVE_EFFICIENCY = 0.8
PCIE_LATENCY_SECONDS = 4e-6


class GpuLink(Struct, frozen=True, kw_only=True):
    """Links from one GPU to the others of its domain."""

    name: str
    links: int
    link_bandwidth: float  # bytes per second of one link, one way
    efficiency: float  # share that a large collective reaches
    latency_seconds: float
    in_network_reduction: bool = False  # the switch adds (NVLS)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a GPU, one way."""
        return self.links * self.link_bandwidth


class Nic(Struct, frozen=True, kw_only=True):
    """A network card."""

    name: str
    bandwidth: float  # line rate in bytes per second, one way
    payload_share: float  # of the line rate that is not headers
    latency_seconds: float


class Fabric(Struct, frozen=True, kw_only=True):
    """The network between nodes."""

    name: str
    kind: Literal["rail-optimised", "fat-tree", "dragonfly", "torus"]
    radix: int  # ports of a switch
    pod_gpus: int  # GPUs that reach each other at full rate; 0: all of them
    oversubscription: float  # rate inside a pod over rate between pods
    switch_latency_seconds: float
    in_network_reduction: bool = False  # SHARP

    def tiers(self, ends: int) -> int:
        """Levels of switches that a non-blocking tree needs for this many ends."""
        level, reach = 1, self.radix
        while reach < ends:
            level, reach = level + 1, reach * self.radix // 2
        return level

    def hops(self, ends: int) -> int:
        """Switches on the longest path between two of this many ends."""
        if self.kind == "dragonfly":  # local, global, local: at most one switch each side more
            return 1 if ends <= self.radix // 2 else 2 if ends <= self.pod_gpus else 4
        if self.kind == "torus":
            return max(1, round(1.5 * math.cbrt(ends)))
        return 2 * self.tiers(ends) - 1


@cache
def pcie_bandwidth(generation: int, lanes: int = 16) -> float:
    """Bytes per second one way: transfers a second times lanes times the line code's payload."""
    generations = {str(entry["generation"]): entry for entry in table("links.toml")["pcie"]}
    entry = find(generations, str(generation), "pcie generation")
    payload, coded = entry["code"]
    return float(entry["gigatransfers_per_second"] * 1e9 * lanes / 8 * payload / coded)


@cache
def links() -> dict[str, GpuLink]:
    """Links by name; PCIe x16 stands among them for cards in slots."""
    by_name = {
        entry["name"]: GpuLink(
            name=entry["name"],
            links=entry["links"],
            link_bandwidth=entry["gb_per_second"] * 1e9,
            efficiency=entry["efficiency"],
            latency_seconds=entry["latency_us"] * 1e-6,
            in_network_reduction=entry.get("in_network_reduction", False),
        )
        for entry in table("links.toml")["link"]
    }
    for entry in table("links.toml")["pcie"]:
        name = f"pcie{entry['generation']}"
        by_name[name] = GpuLink(
            name=name,
            links=1,
            link_bandwidth=pcie_bandwidth(entry["generation"]),
            efficiency=PCIE_COLLECTIVE_EFFICIENCY,
            latency_seconds=PCIE_LATENCY_SECONDS,
        )
    return by_name


@cache
def nics() -> dict[str, Nic]:
    """Network cards by name."""
    return {
        entry["name"]: Nic(
            name=entry["name"],
            bandwidth=entry["gigabits_per_second"] * 1e9 / 8,
            payload_share=entry["payload_bytes"] / (entry["payload_bytes"] + entry["header_bytes"]),
            latency_seconds=entry["latency_us"] * 1e-6,
        )
        for entry in table("links.toml")["nic"]
    }


@cache
def fabrics() -> dict[str, Fabric]:
    """Fabrics by name."""
    return {
        entry["name"]: Fabric(
            name=entry["name"],
            kind=entry["kind"],
            radix=entry["radix"],
            pod_gpus=entry.get("pod_gpus", 0),
            oversubscription=entry["oversubscription"],
            switch_latency_seconds=entry["switch_latency_us"] * 1e-6,
            in_network_reduction=entry.get("in_network_reduction", False),
        )
        for entry in table("links.toml")["fabric"]
    }
