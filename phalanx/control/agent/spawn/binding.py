"""Which GPU, cores and NUMA node each worker of a job gets on this machine.

LOCAL_RANK i uses the i-th of the GPUs that its job holds here, which are the ones that the driver
shows it (CUDA_VISIBLE_DEVICES), so programs that run under torchrun need no change.
"""

from __future__ import annotations

import ctypes
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Literal

from msgspec import Struct

PREFERRED = 1  # MPOL_PREFERRED of set_mempolicy
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}

Policy = Literal["none", "cores", "numa"]


class NodeTopology(Struct, frozen=True):
    """What a node has, as far as binding needs to know."""

    cores: tuple[int, ...]  # that we may use
    numa: dict[int, tuple[int, ...]]  # cores by NUMA node
    gpus: tuple[int, ...] = ()  # the NUMA node of each GPU; -1: nobody says
    names: tuple[str, ...] = ()  # of each GPU in CUDA_VISIBLE_DEVICES


class WorkerBinding(Struct, frozen=True):
    """The place of one worker."""

    gpu: int = -1  # -1: none
    cores: tuple[int, ...] = ()  # (): all
    numa: int = -1  # whose memory it prefers; -1: any

    def __str__(self) -> str:
        parts = [f"GPU {self.gpu}"] if self.gpu >= 0 else []
        parts += [f"cores {ranges(self.cores)}"] if self.cores else ["all cores"]
        parts += [f"NUMA node {self.numa}"] if self.numa >= 0 else []
        return ", ".join(parts)


def read_machine(
    root: Path = Path("/"), cores: tuple[int, ...] | None = None, shown: str | None = None
) -> NodeTopology:
    """Look at this machine (or at a copy of its /sys and /proc); ``shown`` limits its GPUs."""
    cores = tuple(sorted(os.sched_getaffinity(0))) if cores is None else cores
    shown = os.environ.get("CUDA_VISIBLE_DEVICES") if shown is None else shown
    numa = {}
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        with suppress(OSError, ValueError):
            listed = parse_list((folder / "cpulist").read_text())
            if usable := tuple(core for core in listed if core in cores):
                numa[int(folder.name.removeprefix("node"))] = usable
    near = [
        _numa_of(root, folder.name)
        for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*"))
    ]
    names = [str(index) for index in range(len(near))]
    if shown is not None and near:
        names = [name.strip() for name in shown.split(",") if name.strip()]
    # A GPU that is named by its UUID may be anywhere.
    known = dict(enumerate(near))
    gpus = tuple(known.get(int(name), -1) if name.isdigit() else -1 for name in names)
    return NodeTopology(cores, numa, gpus, tuple(names))


def _numa_of(root: Path, address: str) -> int:
    with suppress(OSError, ValueError):
        return int((root / "sys/bus/pci/devices" / address / "numa_node").read_text())
    return -1


def parse_list(text: str) -> tuple[int, ...]:
    """``0-3,8`` as the kernel writes it."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(numbers)


def ranges(cores: tuple[int, ...]) -> str:
    """The inverse of ``parse_list``."""
    parts: list[tuple[int, int]] = []
    for core in cores:
        if parts and parts[-1][1] == core - 1:
            parts[-1] = parts[-1][0], core
        else:
            parts.append((core, core))
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def held(mask: int, machine: NodeTopology) -> list[int]:
    """The GPUs that a job holds here; a mask of 0 means all."""
    return [gpu for gpu in range(len(machine.gpus)) if not mask or mask >> gpu & 1]


def held_gpus(mask: int, machine: NodeTopology) -> tuple[str, ...]:
    """Their names."""
    return tuple(machine.names[gpu] for gpu in held(mask, machine))


def seats(
    workers: int, mask: int, node_gpus: int, machine: NodeTopology, policy: Policy
) -> list[WorkerBinding]:
    """A seat for each worker of a job; GPUs that others hold keep their share of the cores.

    ``node_gpus``: places that the node offers, each worth an equal share of its cores.
    """
    own = held(mask, machine)
    places = [i for i in range(max(node_gpus, 1)) if not mask or mask >> i & 1]
    bindings = []
    for worker in range(workers):
        gpu = own[worker] if worker < len(own) else -1
        seat = places[worker] if worker < len(places) else worker
        near = machine.gpus[gpu] if gpu >= 0 else -1
        numa = near if policy == "numa" and near in machine.numa else -1
        if policy == "none":
            cores: tuple[int, ...] = ()
        elif numa >= 0:
            sharing = [i for i, node in enumerate(machine.gpus) if node == numa]
            cores = share(machine.numa[numa], sharing.index(gpu), len(sharing))
        else:
            cores = share(machine.cores, seat, max(node_gpus, workers))
        bindings.append(WorkerBinding(gpu, cores, numa))
    return bindings


def share(cores: tuple[int, ...], place: int, places: int) -> tuple[int, ...]:
    """An equal part of some cores; nothing (all of them) where there is less than one each."""
    each = len(cores) // places if places else 0
    return cores[place * each : (place + 1) * each] if each else ()


def visible(gpus: tuple[str, ...]) -> dict[str, str]:
    """What shows a worker the GPUs of its job and no others."""
    if not gpus:
        return {}
    # Numbers are in the order of the bus, as the kernel lists them.
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def prefer_memory(numa: int) -> bool:
    """Have the kernel take this process's memory from a NUMA node while it has some."""
    number = SET_MEMPOLICY.get(platform.machine())
    if numa < 0 or number is None:
        return False
    mask = ctypes.c_ulong(1 << numa)
    bits = ctypes.sizeof(mask) * 8
    done: int = ctypes.CDLL(None).syscall(number, PREFERRED, ctypes.byref(mask), bits)
    return done == 0
