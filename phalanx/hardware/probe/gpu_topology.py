"""The matrix of ``nvidia-smi topo -m``: how near GPUs and network cards are to each other."""

from __future__ import annotations

import re

from msgspec import Struct

from phalanx.hardware.probe.reader import ReadError

TOPOLOGY = ("nvidia-smi", "topo", "-m")
# Nearest first: one PCIe switch, several, a host bridge, a NUMA node, another socket.
PATHS = ("PIX", "PXB", "PHB", "NODE", "SYS")
ONE_SWITCH = ("PIX", "PXB")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class GpuTopology(Struct, frozen=True, kw_only=True):
    """Rows of the matrix by GPU."""

    paths: dict[int, tuple[str, ...]]  # to each GPU
    nics: dict[int, dict[str, str]]  # to each card, by its name
    cpus: dict[int, str]
    numa: dict[int, int]


def parse_topology(text: str) -> GpuTopology:
    """The matrix; ReadError where there is none."""
    lines = _COLOUR.sub("", text).splitlines()
    heads = [line for line in lines if re.match(r"\s*GPU0\b", line) and "Affinity" in line]
    if not heads:
        raise ReadError(" ".join(TOPOLOGY), "has no matrix")
    columns = [cell.strip() for cell in heads[0].split("\t") if cell.strip()]
    if len(columns) == 1:  # some versions align with spaces
        columns = re.split(r"\s{2,}", heads[0].strip())
    legend = dict(re.findall(r"^\s*(NIC\d+): (\S+)\s*$", "\n".join(lines), re.MULTILINE))
    paths: dict[int, tuple[str, ...]] = {}
    nics: dict[int, dict[str, str]] = {}
    cpus: dict[int, str] = {}
    numa: dict[int, int] = {}
    for line in lines[lines.index(heads[0]) + 1 :]:
        match = re.match(r"GPU(\d+)\s", line)
        if match is None:
            continue
        gpu, cells = int(match[1]), line.split()[1:]
        row = dict(zip(columns, cells, strict=False))
        paths[gpu] = tuple(
            row[name] for name in columns if re.fullmatch(r"GPU\d+", name) and name in row
        )
        nics[gpu] = {
            legend.get(name, name): row[name] for name in columns if _is_nic(name) and name in row
        }
        cpus[gpu] = row.get("CPU Affinity", "")
        near = row.get("NUMA Affinity", "")
        numa[gpu] = int(near) if near.isdigit() else -1
    return GpuTopology(paths=paths, nics=nics, cpus=cpus, numa=numa)


def _is_nic(name: str) -> bool:
    return re.fullmatch(r"(NIC\d+|mlx\S+|bnxt\S+|rdma\S+|irdma\S+)", name) is not None


def distance(path: str) -> int:
    """Rank of a path: 0 is the nearest; one that is unknown is the farthest."""
    return PATHS.index(path) if path in PATHS else len(PATHS)


def nearest_nics(near: dict[str, str]) -> tuple[str, ...]:
    """The cards of one GPU's row that are as near as any."""
    best = min(map(distance, near.values()), default=0)
    return tuple(name for name, path in near.items() if distance(path) == best)
