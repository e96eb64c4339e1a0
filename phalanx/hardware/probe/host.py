"""The machine around its GPUs: cores, memory, NUMA nodes, local disks, versions."""

from __future__ import annotations

import re

from phalanx.hardware.probe.description import SYSFS, DriveDescription, Fact
from phalanx.hardware.probe.reader import Reader, listed, number, read

SECTOR_BYTES = 512  # of ``size`` in sysfs, whatever the disk's own are
LIBRARIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")
DMI = "/sys/class/dmi/id"
VIRTUAL = re.compile(r"(loop|ram|zram|dm-|md|sr|nbd|fd)\d*")


def parse_cpus(cpuinfo: str) -> int:
    """Processors in /proc/cpuinfo."""
    return len(re.findall(r"(?m)^processor\s*:", cpuinfo))


def parse_memory(meminfo: str) -> int:
    """Bytes of memory in /proc/meminfo."""
    match = re.search(r"(?m)^MemTotal:\s+(\d+) kB", meminfo)
    return int(match[1]) << 10 if match else 0


def read_host(reader: Reader) -> list[Fact]:
    """What the kernel and the firmware say."""
    facts_read: dict[str, str | int] = {
        "cpus": parse_cpus(read(reader, "/proc/cpuinfo")),
        "memory_bytes": parse_memory(read(reader, "/proc/meminfo")),
        "numa_nodes": len(listed(reader, "/sys/devices/system/node", "node[0-9]*")),
        "machine": read(reader, f"{DMI}/product_name"),
        "vendor": read(reader, f"{DMI}/sys_vendor"),
        "bios": read(reader, f"{DMI}/bios_version"),
        "kernel": read(reader, "/proc/sys/kernel/osrelease"),
        "nccl": find_nccl(reader),
    }
    return [Fact(key, value, SYSFS) for key, value in facts_read.items() if value]


def find_nccl(reader: Reader) -> str:
    """The version of the machine's NCCL library, by its file's name; "": none."""
    for folder in LIBRARIES:
        for name in listed(reader, folder, "libnccl.so.*"):
            if match := re.fullmatch(r"libnccl\.so\.(\d+\.\d+\.\d+)", name):
                return match[1]
    return ""


def read_drives(reader: Reader) -> tuple[DriveDescription, ...]:
    """Local disks; no partitions, and nothing that is made of others."""
    drives = []
    for name in listed(reader, "/sys/block"):
        folder = f"/sys/block/{name}"
        if VIRTUAL.fullmatch(name) or read(reader, f"{folder}/removable") == "1":
            continue
        size = number(read(reader, f"{folder}/size")) * SECTOR_BYTES
        if size:
            model = read(reader, f"{folder}/device/model")
            drives.append(DriveDescription(name=name, size_bytes=size, model=model))
    return tuple(drives)
