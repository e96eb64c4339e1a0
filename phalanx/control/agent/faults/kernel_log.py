"""The kernel's log (/dev/kmsg): memory that ran out or is broken, PCIe, disks, GPUs, links.

A record is ``priority,sequence,microseconds,flags;text``, and lines that begin with a blank
belong to it as ``KEY=value``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from phalanx.cluster.causes import Cause
from phalanx.cluster.protocol.messages import THIS_NODE, DeviceError
from phalanx.control.agent.faults.xid import xid_fault

READ_BYTES = 8192  # the kernel gives one whole record a read
KILLED_KEPT = 256


class KernelMessage(Struct, frozen=True):
    """One message of the kernel."""

    sequence: int
    text: str


class OomKill(Struct, frozen=True):
    """The kernel killed a process for its memory."""

    pid: int
    text: str


def parse_record(line: str) -> KernelMessage | None:
    """A line of /dev/kmsg; None for what is no record, and for what users wrote there."""
    head, found, text = line.partition(";")
    fields = head.split(",")
    if not found or len(fields) < 3 or not (fields[0].isdigit() and fields[1].isdigit()):
        return None
    if int(fields[0]) >> 3:  # a facility other than the kernel's
        return None
    return KernelMessage(int(fields[1]), text.split("\n", 1)[0].strip())


_OOM = re.compile(r"(?:Out of memory|Memory cgroup out of memory).*?[Kk]illed process (\d+)")
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+), ?(.*)")
_SXID = re.compile(r"nvidia-nvswitch\d+: SXid \(PCI:[0-9a-fA-F:.]+\): (\d+), (Fatal|Non-fatal)")
_TABLE = tuple(
    (cause, re.compile(pattern))
    for cause, pattern in (
        (Cause.PCIE, r"AER:.*Uncorrect(?:ed|able) \((?:Fatal|Non-Fatal)\) error"),
        (Cause.PCIE, r"PCIe Bus Error: severity=Uncorrect(?:ed|able)"),
        (Cause.PCIE, r"pciehp.*(?:Link Down|Card not present)"),
        (Cause.DRAM, r"EDAC MC\d+: \d+ UE "),
        (Cause.DRAM, r"Memory failure: 0x[0-9a-f]+: recovery action for (?!free)"),
        (Cause.DRAM, r"mce: Uncorrected hardware memory error"),
        (Cause.CPU, r"mce: \[Hardware Error\]: CPU \d+: Machine Check Exception: [1-9]"),
        (Cause.CPU, r"watchdog: BUG: soft lockup|Watchdog detected hard LOCKUP"),
        (Cause.SSD, r"(?:critical medium|I/O|critical target) error, dev (?:nvme|sd)\w+"),
        (Cause.SSD, r"nvme nvme\d+: (?:Device not ready|Removing after probe|controller is down)"),
        (Cause.SSD, r"EXT4-fs .*Remounting filesystem read-only"),
        (Cause.SSD, r"XFS .*Corruption .* detected"),
        (Cause.DRIVER, r"NVRM: (?:RmInitAdapter failed|API mismatch)"),
        (Cause.GPU_UNAVAILABLE, r"NVRM: .*GPU has fallen off the bus"),
        (Cause.FILESYSTEM_MOUNT, r"nfs: server \S+ not responding, timed out"),
        (Cause.FILESYSTEM_MOUNT, r"LustreError: .*This client was evicted"),
    )
)


def fault_of(record: KernelMessage, gpus: Mapping[str, int]) -> DeviceError | OomKill | None:
    """What a message of the kernel means for this node; ``gpus`` by their PCI address."""
    text = record.text
    if match := _OOM.search(text):
        return OomKill(int(match[1]), text[:500])
    if match := _XID.search(text):
        return xid_fault(int(match[2]), gpus.get(pci_address(match[1]), -1), match[3])
    if match := _SXID.search(text):
        if match[2] != "Fatal":
            return None
        return DeviceError(node=THIS_NODE, cause=Cause.NVSWITCH, detail=text[:500])
    for cause, pattern in _TABLE:
        if pattern.search(text):
            return DeviceError(node=THIS_NODE, cause=cause, detail=text[:500])
    return None


def pci_address(text: str) -> str:
    """``0000:3B:00`` and ``00000000:3b:00.0`` are the same device."""
    parts = text.lower().removesuffix(".0").split(":")
    return ":".join(f"{int(part, 16):x}" for part in parts if part)


class KernelLog:
    """Reads new records as they come. ``heard`` takes each fault."""

    def __init__(
        self, path: Path, gpus: Mapping[str, int], heard: Callable[[DeviceError | OomKill], None]
    ) -> None:
        self.killed: dict[int, str] = {}  # processes that ran out of memory, newest last
        self._gpus, self._heard = gpus, heard
        self._rest = b""
        self._last = -1
        self.file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with suppress(OSError):  # a pipe has no end to go to
            os.lseek(self.file, 0, os.SEEK_END)  # what was before us is history

    def read(self) -> None:
        """Take in what there is."""
        while True:
            try:
                data = os.read(self.file, READ_BYTES)
            except BrokenPipeError:
                continue  # the kernel wrote over records before we read them
            except OSError:  # nothing more for now
                return
            if not data:
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._take(line.decode(errors="replace"))

    def _take(self, line: str) -> None:
        record = parse_record(line)
        if record is None or record.sequence <= self._last:
            return
        self._last = record.sequence
        fault = fault_of(record, self._gpus)
        if isinstance(fault, OomKill):
            self.killed[fault.pid] = fault.text
            while len(self.killed) > KILLED_KEPT:
                del self.killed[next(iter(self.killed))]
        if fault is not None:
            self._heard(fault)

    def close(self) -> None:
        os.close(self.file)
