"""A node's description of itself: facts, each with the source that it comes from."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import Struct, structs

# Whoever says a fact first in this order is believed.
OPTION, SITE_FILE = "agent option", "site file"
NVIDIA_SMI, SLURM, KUBERNETES, MPI = "nvidia-smi", "slurm", "kubernetes", "mpi"
INFINIBAND, LLDP, SYSFS, CATALOGUE = "infiniband", "lldp", "sysfs", "catalogue"
DEVICES = "devices"  # counted on the machine, and offered to jobs
READ = (NVIDIA_SMI, INFINIBAND, LLDP, SYSFS)  # sources that are read again and again
PRECEDENCE = (
    *(OPTION, SITE_FILE, NVIDIA_SMI, SLURM, KUBERNETES, MPI),
    *(INFINIBAND, LLDP, DEVICES, SYSFS, CATALOGUE),
)

MOST_ROWS = {"facts": 64, "gpus": 64, "nics": 128, "drives": 256, "unread": 64, "warnings": 64}
MOST_LETTERS = 512  # of one text
MOST_LISTED = 256  # entries of a row's own lists
MOST_NUMBER = 1 << 62


class Fact(Struct, frozen=True):
    """One thing that is known of a node, and who says so."""

    key: str  # "leaf", "driver", …
    value: str | int
    source: str


class Row(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of parts of a node."""


class GpuDescription(Row, frozen=True):
    """One GPU; what is empty, 0 or -1 nobody says."""

    index: int
    product: str = ""
    uuid: str = ""
    memory_bytes: int = 0
    pci: str = ""
    numa_node: int = -1
    cpus: str = ""  # near it, as the kernel lists them: "0-47,96-143"
    pcie_generation: int = 0
    pcie_lanes: int = 0
    nvlinks: int = 0
    nvlink_bytes_per_second: int = 0  # of all links together, one way
    power_limit_watts: int = 0
    firmware: str = ""
    fabric_state: str = ""
    paths: tuple[str, ...] = ()  # to each GPU, as nvidia-smi's matrix has them: "NV18", "PXB"
    nics: tuple[str, ...] = ()  # nearest ones
    source: str = NVIDIA_SMI


class NicDescription(Row, frozen=True):
    """One network card's port."""

    name: str  # "mlx5_0", or the interface where it has no RDMA
    interface: str = ""
    link_layer: str = ""  # "InfiniBand", "Ethernet"
    bits_per_second: int = 0
    active: bool = False
    pci: str = ""
    numa_node: int = -1
    firmware: str = ""
    gpus: tuple[int, ...] = ()  # that it is nearest to
    rail: int = -1  # that it is part of; -1: of none
    switch: str = ""  # that it is connected to
    switch_source: str = ""
    source: str = SYSFS


class DriveDescription(Row, frozen=True):
    """One local disk."""

    name: str
    size_bytes: int
    model: str = ""
    source: str = SYSFS


class NodeDescription(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that a node says of itself."""

    facts: tuple[Fact, ...] = ()
    gpus: tuple[GpuDescription, ...] = ()
    nics: tuple[NicDescription, ...] = ()
    drives: tuple[DriveDescription, ...] = ()
    unread: tuple[str, ...] = ()  # what could not be read, and why
    warnings: tuple[str, ...] = ()  # what a person should look at

    def fact(self, key: str) -> Fact | None:
        """The fact of a key; None where nobody knows it."""
        return next((fact for fact in self.facts if fact.key == key), None)


def bad_description(described: NodeDescription) -> str:
    """What is wrong with a description that somebody sent; "": nothing."""
    for name, most in MOST_ROWS.items():
        if len(getattr(described, name)) > most:
            return f"{name}: at most {most}"
    for value in _parts(described):
        if isinstance(value, str) and len(value) > MOST_LETTERS:
            return f"{value[:40]!r}…: at most {MOST_LETTERS} letters"
        if isinstance(value, int) and abs(value) > MOST_NUMBER:
            return f"{value}: at most {MOST_NUMBER}"
        if isinstance(value, tuple) and len(value) > MOST_LISTED:
            return f"a list of {len(value)}: at most {MOST_LISTED}"
    return ""


def changed_facts(old: NodeDescription, new: NodeDescription) -> list[str]:
    """What differs between two descriptions, in words."""
    before = {fact.key: fact.value for fact in old.facts}
    after = {fact.key: fact.value for fact in new.facts}
    lines = [
        f"{key} {before.get(key, 'unknown')} -> {after.get(key, 'unknown')}"
        for key in {**before, **after}
        if before.get(key) != after.get(key)
    ]
    parts = ("gpus", "nics", "drives")
    return lines + [f"{name} changed" for name in parts if getattr(old, name) != getattr(new, name)]


def _parts(described: NodeDescription) -> Iterator[object]:
    """Everything inside a description; of a list that is too long its beginning."""
    left: list[object] = [described]
    while left:
        inner = left.pop()
        if isinstance(inner, Struct):
            left.extend(structs.astuple(inner))
            continue
        if isinstance(inner, tuple):
            left.extend(inner[:MOST_LISTED])
        yield inner


def kept_description(data: bytes) -> NodeDescription | None:
    """A description as a file keeps it; None where it cannot be read any more."""
    try:
        return msgspec.json.decode(data, type=NodeDescription)
    except msgspec.MsgspecError:
        return None
