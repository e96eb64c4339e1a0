"""The catalogue of hardware: what each device, link, server and fabric can do, as data files."""

from __future__ import annotations

from phalanx.hardware.clusters import Cluster, ClusterFile, cluster, make_cluster, parse_count
from phalanx.hardware.gpus import Gpu, catalogue, gpu, gpus_by_key, lookup
from phalanx.hardware.links import (
    Fabric,
    GpuLink,
    Nic,
    fabrics,
    links,
    nics,
    pcie_bandwidth,
)
from phalanx.hardware.nodes import Drives, NodeType, nodes
from phalanx.hardware.this_machine import available_memory, count_cuda

__all__ = [
    "Cluster",
    "ClusterFile",
    "Drives",
    "Fabric",
    "Gpu",
    "GpuLink",
    "Nic",
    "NodeType",
    "available_memory",
    "catalogue",
    "cluster",
    "count_cuda",
    "fabrics",
    "gpu",
    "gpus_by_key",
    "links",
    "lookup",
    "make_cluster",
    "nics",
    "nodes",
    "parse_count",
    "pcie_bandwidth",
]
