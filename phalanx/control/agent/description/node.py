"""From a description to the node that the core places jobs on."""

from __future__ import annotations

import os

from msgspec import structs

from phalanx.cluster.node import MOST_RAILS, WORD, Node
from phalanx.hardware.probe.description import DEVICES, OPTION, Fact, NodeDescription
from phalanx.hardware.probe.host import parse_cpus, parse_memory
from phalanx.hardware.probe.reader import Reader, listed, read
from phalanx.hardware.probe.recorded import RecordedReader

PLACES = ("domain", "leaf", "pod", "rack", "power", "switch", "partition")
MOST_NAME = 128  # letters of a place's name


def base_node(name: str, gpus: int | None, reader: Reader) -> Node:
    """What a machine offers jobs: its GPUs (those that are given, or all), cores and memory."""
    if isinstance(reader, RecordedReader):
        return Node(
            name=name,
            gpus=len(listed(reader, "/dev", "nvidia[0-9]*")) if gpus is None else gpus,
            cpus=parse_cpus(read(reader, "/proc/cpuinfo")),
            memory_bytes=parse_memory(read(reader, "/proc/meminfo")),
        )
    if gpus is None:
        from phalanx.hardware import count_cuda

        gpus = count_cuda()
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    cpus = len(os.sched_getaffinity(0))
    return Node(name=name, gpus=gpus, cpus=cpus, memory_bytes=pages * size)


def offered_facts(base: Node, gpus_source: str) -> tuple[Fact, ...]:
    """What the node offers, as facts: less than the machine has, perhaps."""
    return (
        Fact("gpus", base.gpus, gpus_source or DEVICES),
        Fact("cpus", base.cpus, DEVICES),
        Fact("memory_bytes", base.memory_bytes, DEVICES),
    )


def described_node(base: Node, description: NodeDescription) -> Node:
    """The node as its description has it; what cannot be used is left out."""
    changes: dict[str, object] = {}
    for key in PLACES:
        if value := _text(description, key):
            changes[key] = value[:MOST_NAME]
    kind = _text(description, "kind")
    if WORD.fullmatch(kind) and len(kind) <= MOST_NAME:
        changes["kind"] = kind
    rails = description.fact("rails")
    if rails is not None and isinstance(rails.value, int) and 1 <= rails.value <= MOST_RAILS:
        changes["rails"] = rails.value
    words = [word for word in _text(description, "features").split(",") if WORD.fullmatch(word)]
    return structs.replace(base, features=tuple(words), **changes)


def count_warning(base: Node, description: NodeDescription) -> str:
    """What is to be said where the driver lists other GPUs than the node offers; "": nothing."""
    offered, listed_gpus = description.fact("gpus"), len(description.gpus)
    if offered is None or offered.source == OPTION or not listed_gpus:
        return ""
    if listed_gpus >= base.gpus:
        return ""
    return (
        f"nvidia-smi lists {listed_gpus} GPUs, and this node offers {base.gpus}: the agent counts "
        "them again when it is restarted"
    )


def _text(description: NodeDescription, key: str) -> str:
    fact = description.fact(key)
    return str(fact.value) if fact is not None else ""
