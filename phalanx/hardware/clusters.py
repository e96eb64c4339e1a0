"""Clusters by name (``h100-16k``), or from a user's file."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, structs

from phalanx.config import ConfigError, Section
from phalanx.config.errors import plain_reason
from phalanx.config.toml_text import parse_toml
from phalanx.config.tree import build, mistakes
from phalanx.hardware.gpus import Gpu, gpu, gpus_by_key
from phalanx.hardware.links import Fabric, GpuLink, Nic, fabrics, links, nics
from phalanx.hardware.nodes import Drives, NodeType, nodes
from phalanx.hardware.tables import find, nearest, table

MOST_GPUS = 10_000_000
ONE_KIND = (
    "plan each kind of GPU by itself, or all as the slowest one: a step takes as long as on those"
)


class ClusterFile(Section, frozen=True, kw_only=True):
    """A cluster as a file describes it; what is left out is usual for the GPU."""

    gpu: str
    """Short name of the GPU, e.g. "h100"."""
    gpus: Annotated[int, Meta(ge=1, le=MOST_GPUS)]
    """GPUs in the cluster."""
    node: str = ""
    """Kind of server; "": the usual one."""
    gpus_per_node: Annotated[int, Meta(ge=0)] = 0
    """GPUs in a server; 0: as in the kind of server."""
    domain_gpus: Annotated[int, Meta(ge=0)] = 0
    """GPUs that NVLink or xGMI joins; 0: as in the kind of server."""
    link: str = ""
    """Link inside a domain, e.g. "nvlink4"."""
    nic: str = ""
    """Network card, e.g. "ndr" or "roce-400"."""
    nics_per_gpu: Annotated[float, Meta(ge=0)] = 0.0
    """Cards for each GPU; 0: as in the kind of server."""
    fabric: str = ""
    """Network between nodes, e.g. "rail-optimised" or "fat-tree"."""
    pod_gpus: Annotated[int, Meta(ge=0)] = 0
    """GPUs that reach each other at full rate; 0: as in the fabric."""
    oversubscription: Annotated[float, Meta(ge=0)] = 0.0
    """Rate inside a pod over rate between pods; 0: as in the fabric."""
    host_memory_gib: Annotated[int, Meta(ge=0)] = 0
    """Memory of a server's hosts; 0: as in the kind of server."""
    nvme_terabytes: Annotated[float, Meta(ge=0)] | None = None
    """Local NVMe of a server; 0: it has none. Left out: as in the kind of server."""
    nvme_read_gb_per_second: Annotated[float, Meta(ge=0)] = 0.0
    """Of all drives of a server together; 0: as in the kind of server."""
    nvme_write_gb_per_second: Annotated[float, Meta(ge=0)] = 0.0
    """Of all drives of a server together; 0: as in the kind of server."""
    price_per_gpu_hour: Annotated[float, Meta(ge=0)] = 0.0
    """Dollars; 0: the catalogue's."""
    # Google's fleet average of 2024, https://datacenters.google/efficiency
    pue: Annotated[float, Meta(ge=1)] = 1.09
    """Energy of the building over energy of its computers."""
    # U.S. Energy Information Administration, 2022: 1,650 Mt for 4,231 TWh
    carbon_kg_per_kwh: Annotated[float, Meta(ge=0)] = 0.39
    """Carbon dioxide of a kilowatt-hour where the cluster stands."""
    # Latif et al. 2024 (arXiv:2412.08602): at most 8.4 kW of the rated 10.2 on eight H100
    power_load: Annotated[float, Meta(gt=0, le=1)] = 0.82
    """Share of a server's rated power that training draws."""


class Cluster(Struct, frozen=True, kw_only=True):
    """GPUs and what joins, feeds and pays for them."""

    name: str
    gpu: Gpu
    gpus: int
    gpus_per_node: int
    gpus_per_rack: int
    domain_gpus: int  # GPUs joined by NVLink or xGMI
    link: GpuLink  # inside a domain
    nic: Nic
    nics_per_gpu: float
    fabric: Fabric
    host_bandwidth: float  # bytes per second between a GPU and host memory, one way
    host_memory_per_gpu: float  # bytes
    host_memory_bandwidth: float  # bytes per second of host memory, a GPU's share
    nvme: Drives  # a GPU's share of the local drives
    node_watts: float  # rated
    power_load: float  # share of the rating that training draws
    pue: float
    carbon_kg_per_kwh: float
    price_per_gpu_hour: float  # dollars

    @property
    def nodes(self) -> int:
        """Servers, the last one possibly used in part."""
        return -(-self.gpus // self.gpus_per_node)

    @property
    def domain_bandwidth(self) -> float:
        """Bytes per second of a GPU to its NVLink domain, one way."""
        return self.link.bandwidth

    @property
    def network_bandwidth(self) -> float:
        """Bytes per second of a GPU to the network, one way, at line rate."""
        return self.nic.bandwidth * self.nics_per_gpu

    @property
    def network_latency_seconds(self) -> float:
        """One way between the two GPUs that are farthest apart."""
        rails = self.gpus_per_node if self.fabric.kind == "rail-optimised" else 1
        hops = self.fabric.hops(max(2, self.gpus // rails))
        return self.nic.latency_seconds + hops * self.fabric.switch_latency_seconds

    @property
    def watts_per_gpu(self) -> float:
        """Drawn at the meter of the building for each GPU in training."""
        return self.node_watts / self.gpus_per_node * self.power_load * self.pue


@cache
def cluster(name: str) -> Cluster:
    """The cluster of a name or a file.

    ``h100-16k`` is 16,384 H100s in their usual servers and fabric; ``selene-512`` a part of a
    catalogued machine; ``site.toml`` a file.
    """
    if name.endswith(".toml"):
        return _from_file(Path(name))
    described = _described(name)
    if described is None:
        fix = ONE_KIND if any(sign in name for sign in "+,") else _nearest_cluster(name)
        raise ConfigError("cluster", f'"{name}"', "no such cluster", fix)
    return make_cluster(name, described)


def make_cluster(name: str, described: ClusterFile) -> Cluster:
    """The cluster that a description and the catalogue's usual parts give."""
    device = gpu(described.gpu)
    node = find(nodes(), described.node or device.node, "node")
    gpus_per_node = described.gpus_per_node or node.gpus
    _check_count(described.gpus, gpus_per_node)
    _check_network(described, gpus_per_node)
    network = find(fabrics(), described.fabric or node.fabric, "fabric")
    return Cluster(
        name=name,
        gpu=device,
        gpus=described.gpus,
        gpus_per_node=min(gpus_per_node, described.gpus),
        gpus_per_rack=max(node.gpus_per_rack, gpus_per_node),
        domain_gpus=_domain(described, node, gpus_per_node),
        link=find(links(), described.link or node.link, "link"),
        nic=find(nics(), described.nic or node.nic, "nic"),
        nics_per_gpu=described.nics_per_gpu or node.nics_per_gpu,
        fabric=structs.replace(
            network,
            pod_gpus=described.pod_gpus or network.pod_gpus,
            oversubscription=described.oversubscription or network.oversubscription,
        ),
        host_bandwidth=node.host_bandwidth,
        host_memory_per_gpu=(described.host_memory_gib * 2**30 or node.host_memory_bytes)
        / gpus_per_node,
        host_memory_bandwidth=node.host_memory_bandwidth / gpus_per_node,
        nvme=_nvme(described, node, gpus_per_node),
        node_watts=_node_watts(node, device, min(gpus_per_node, described.gpus)),
        power_load=described.power_load,
        pue=described.pue,
        carbon_kg_per_kwh=described.carbon_kg_per_kwh,
        price_per_gpu_hour=described.price_per_gpu_hour or device.price_per_hour,
    )


def parse_count(text: str) -> int | None:
    """GPUs that "512", "16k" or "100k" mean; None for anything else.

    Clusters grow in powers of two, or three times one: their "k" is 1024 (16k, 24k); any other
    is a round thousand (100k).
    """
    match = re.fullmatch(r"(\d{1,9})(k?)", text.casefold())
    if match is None:
        return None
    number = int(match[1])
    if not match[2]:
        return number
    odd = number // 3 if number % 3 == 0 else number
    return number * (1024 if odd & (odd - 1) == 0 else 1000)


def _described(name: str) -> ClusterFile | None:
    folded = name.casefold()
    sites = table("clusters.toml")
    if folded in sites:
        return build(ClusterFile, sites[folded])
    prefix, _, count = folded.rpartition("-")
    gpus = parse_count(count)
    if gpus is None:
        return None
    if not 1 <= gpus <= MOST_GPUS:
        rule, near = f"must have 1 to {MOST_GPUS:,} GPUs", min(max(gpus, 1), MOST_GPUS)
        raise ConfigError("cluster", f'"{name}"', rule, f'nearest: "{prefix}-{near}"')
    if prefix in sites:
        return _part_of(prefix, build(ClusterFile, sites[prefix]), gpus)
    if prefix in gpus_by_key():
        return ClusterFile(gpu=prefix, gpus=gpus)
    return None


def _part_of(site: str, whole: ClusterFile, gpus: int) -> ClusterFile:
    if gpus > whole.gpus:
        fix = f'try "{site}-{whole.gpus}", or the same GPUs as "{whole.gpu}-{gpus}"'
        raise ConfigError("cluster", f'"{site}-{gpus}"', f"has {whole.gpus:,} GPUs", fix)
    return structs.replace(whole, gpus=gpus)


def _check_count(gpus: int, gpus_per_node: int) -> None:
    if gpus > gpus_per_node and gpus % gpus_per_node:
        below = gpus // gpus_per_node * gpus_per_node
        rule = f"must fill whole nodes of {gpus_per_node}"
        raise ConfigError("gpus", gpus, rule, f"try {below} or {below + gpus_per_node}")


def _check_network(described: ClusterFile, gpus_per_node: int) -> None:
    domain, pod = described.domain_gpus, described.pod_gpus
    for name, size in (("domain_gpus", domain), ("pod_gpus", pod)):
        parts = name == "domain_gpus" and size and gpus_per_node % size == 0
        if size % gpus_per_node and not parts:
            near = max(1, round(size / gpus_per_node)) * gpus_per_node
            rule = f"must be whole nodes of {gpus_per_node}"
            rule += ", or even parts of one" if name == "domain_gpus" else ""
            raise ConfigError(name, size, rule, f"nearest: {near}")
    if 0 < described.oversubscription < 1:
        rule = "must be 1 or more: between pods nothing is faster than inside"
        raise ConfigError("oversubscription", described.oversubscription, rule, "try 1")


def _node_watts(node: NodeType, device: Gpu, gpus: int) -> float:
    # A server used in part is charged its GPUs' share of the hosts.
    return gpus * (node.watts / node.gpus + device.tdp_watts - node.gpu_watts)


def _nvme(described: ClusterFile, node: NodeType, gpus_per_node: int) -> Drives:
    usual, given = node.drives, described.nvme_terabytes
    capacity = usual.capacity_bytes if given is None else given * 1e12
    if capacity <= 0:
        return Drives()
    read = described.nvme_read_gb_per_second * 1e9 or usual.read_bandwidth
    write = described.nvme_write_gb_per_second * 1e9 or usual.write_bandwidth
    if not read or not write:
        rule = "needs the speed of the drives"
        fix = "set nvme_read_gb_per_second and nvme_write_gb_per_second"
        raise ConfigError("nvme_terabytes", given, rule, fix)
    return Drives(capacity / gpus_per_node, read / gpus_per_node, write / gpus_per_node)


def _domain(described: ClusterFile, node: NodeType, gpus_per_node: int) -> int:
    usual = node.domain_gpus if node.domain_gpus != node.gpus else gpus_per_node
    return min(described.domain_gpus or usual, described.gpus)


def _nearest_cluster(name: str) -> str:
    prefix, _, count = name.casefold().rpartition("-")
    names = [*gpus_by_key(), *table("clusters.toml")]
    if parse_count(count) is None:
        prefix, count = name.casefold(), "1024"
    if prefix in gpus_by_key():
        return f'say how many GPUs, e.g. "{prefix}-{count}"'
    near = nearest(prefix, names)
    return near.replace('"?', f'-{count}"?').replace('" or', f'-{count}" or')


def _from_file(path: Path) -> Cluster:
    try:
        described: dict[str, Any] = parse_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        fix = "give the path of a cluster's TOML file, or a name such as h100-16k"
        raise ConfigError("cluster", str(path), "no such file", fix) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        rule = f"cannot be read: {plain_reason(error)}"
        fix = "correct the file, or use a name such as h100-16k"
        raise ConfigError("cluster", str(path), rule, fix) from None
    found = mistakes(ClusterFile, described)
    if found:
        raise ConfigError.of(found)
    return make_cluster(path.stem, build(ClusterFile, described))
