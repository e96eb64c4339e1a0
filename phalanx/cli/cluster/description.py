"""A node's description for people: every fact with its source."""

from __future__ import annotations

from phalanx.cli.tables import add_row, plain, print_table, table
from phalanx.hardware.probe.description import GpuDescription, NicDescription, NodeDescription

BYTES = ("memory_bytes", "gpu_memory_bytes", "local_disk_bytes")


def print_description(described: NodeDescription) -> None:
    """Facts, GPUs and cards as tables; then what could not be read and what is odd."""
    facts = table("FACT", "VALUE", "SOURCE")
    for fact in sorted(described.facts, key=lambda fact: fact.key):
        add_row(facts, fact.key, _shown(fact.key, fact.value), fact.source)
    print_table(facts)
    if described.gpus:
        gpus = table("GPU", "PRODUCT", "MEMORY", "PCIE", "NUMA", "NVLINK", "POWER", "NEAR")
        for gpu in described.gpus:
            add_row(gpus, *_gpu_cells(gpu))
        print_table(gpus)
    if described.nics:
        nics = table("CARD", "LINK", "RATE", "STATE", "NUMA", "RAIL", "GPUS", "SWITCH", "SOURCE")
        for nic in described.nics:
            add_row(nics, *_nic_cells(nic))
        print_table(nics)
    for line in described.warnings:
        print(plain(f"warning: {line}"))
    for line in described.unread:
        print(plain(f"not read: {line}"))


def _shown(key: str, value: str | int) -> str:
    if isinstance(value, str):
        return value
    if key in BYTES:
        return f"{value / 2**30:,.0f} GiB"
    return f"{value / 1e9:.0f} Gb/s" if key == "nic_bits_per_second" else str(value)


def _gpu_cells(gpu: GpuDescription) -> tuple[object, ...]:
    rate = f" ({gpu.nvlink_bytes_per_second / 1e9:.0f} GB/s)" if gpu.nvlinks else ""
    return (
        gpu.index,
        gpu.product,
        _shown("memory_bytes", gpu.memory_bytes),
        f"gen{gpu.pcie_generation} x{gpu.pcie_lanes}",
        gpu.numa_node if gpu.numa_node >= 0 else "",
        f"{gpu.nvlinks}{rate}",
        f"{gpu.power_limit_watts} W",
        " ".join(gpu.nics),
    )


def _nic_cells(nic: NicDescription) -> tuple[object, ...]:
    return (
        nic.name if nic.interface in ("", nic.name) else f"{nic.name} ({nic.interface})",
        nic.link_layer,
        f"{nic.bits_per_second / 1e9:.0f} Gb/s",
        "up" if nic.active else "down",
        nic.numa_node if nic.numa_node >= 0 else "",
        nic.rail if nic.rail >= 0 else "",
        " ".join(map(str, nic.gpus)),
        nic.switch,
        " ".join(filter(None, (nic.source, nic.switch_source))),
    )
