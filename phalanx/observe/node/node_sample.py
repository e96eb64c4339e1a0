"""What a node's devices do: CPU, memory, disks, network, and GPUs where NVML is there.

Read by the agent every few seconds; counters become rates between two looks. Whatever cannot be
read is left out: a driver that hangs or a file that is missing costs its own numbers alone.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from phalanx.observe.node.dcgm import EXPORTER, Dcgm
from phalanx.observe.node.gpu_sample import Gpus, open_nvml

HOST = (
    "cpu_utilization",
    "load",
    "memory_used_bytes",
    "memory_total_bytes",
    "swap_used_bytes",
    "disk_free_bytes",
    "network_receive_bytes_per_second",
    "network_transmit_bytes_per_second",
    "network_errors",
    "infiniband_receive_bytes_per_second",
    "infiniband_transmit_bytes_per_second",
    "infiniband_errors",
    "out_of_memory_kills",
)
RATES = {
    "count_receive": "network_receive_bytes_per_second",
    "count_transmit": "network_transmit_bytes_per_second",
    "count_fabric_receive": "infiniband_receive_bytes_per_second",
    "count_fabric_transmit": "infiniband_transmit_bytes_per_second",
}
LOOPBACK = "lo"
FABRIC_WORD_BYTES = 4  # InfiniBand's data counters count words
FABRIC_ERRORS = ("symbol_error", "link_downed", "port_rcv_errors", "port_xmit_discards")


class NodeSample(Struct, frozen=True, kw_only=True, tag_field="kind", tag=True):
    """One look at a node, as its agent sends it."""

    node: int
    time_ns: int
    host: dict[str, float]
    gpus: dict[str, tuple[float, ...]] = {}  # by metric, a value a GPU


class Sampler:
    """Looks again and again. ``proc`` is another folder in tests."""

    def __init__(
        self,
        folder: Path,
        proc: Path = Path("/proc"),
        *,
        infiniband: Path = Path("/sys/class/infiniband"),
        gpus: bool = True,
        dcgm: str = EXPORTER,
    ) -> None:
        self._folder, self._proc, self._infiniband = folder, proc, infiniband
        nvml = open_nvml() if gpus else None
        self._gpus = Gpus(nvml, Dcgm(dcgm) if dcgm and nvml is not None else None)
        self._before: dict[str, float] = {}
        self._at = 0.0

    def look(self) -> tuple[dict[str, float], dict[str, tuple[float, ...]]]:
        """Values of the host and of its GPUs."""
        host: dict[str, float] = {}
        for read in (self._cpu, self._memory, self._disk, self._network, self._fabric, self._kills):
            with suppress(OSError, ValueError, IndexError, KeyError):
                host |= read()
        now = time.monotonic()
        rates = self._rates(host, now - self._at if self._at else 0.0)
        self._at = now
        return rates, self._gpus.look()

    def _rates(self, host: dict[str, float], seconds: float) -> dict[str, float]:
        """Counters as rates; a counter that went back (a driver loaded anew) gives none."""
        counters = {name: host.pop(name) for name in list(host) if name.startswith("count_")}
        before, self._before = self._before, counters
        passed = {n: v - before[n] for n, v in counters.items() if n in before and v >= before[n]}
        for count, name in RATES.items():
            if seconds > 0 and count in passed:
                host[name] = passed[count] / seconds
        if passed.get("count_cpu"):
            host["cpu_utilization"] = passed.get("count_busy", 0.0) / passed["count_cpu"]
        return host

    def _cpu(self) -> dict[str, float]:
        words = (self._proc / "stat").read_text().partition("\n")[0].split()
        ticks = [float(word) for word in words[1:9]]
        load = float((self._proc / "loadavg").read_text().split()[0])
        idle = ticks[3] + ticks[4]
        return {"count_cpu": sum(ticks), "count_busy": sum(ticks) - idle, "load": load}

    def _memory(self) -> dict[str, float]:
        sample = {}
        for line in (self._proc / "meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            sample[name] = float(rest.split()[0]) * 1024
        return {
            "memory_total_bytes": sample["MemTotal"],
            "memory_used_bytes": sample["MemTotal"] - sample["MemAvailable"],
            "swap_used_bytes": sample["SwapTotal"] - sample["SwapFree"],
        }

    def _disk(self) -> dict[str, float]:
        status = os.statvfs(self._folder)
        return {"disk_free_bytes": float(status.f_bavail * status.f_frsize)}

    def _network(self) -> dict[str, float]:
        receive = transmit = errors = 0.0
        for line in (self._proc / "net" / "dev").read_text().splitlines()[2:]:
            name, _, rest = line.partition(":")
            counters = rest.split()
            if name.strip() != LOOPBACK:
                receive, transmit = receive + float(counters[0]), transmit + float(counters[8])
                errors += float(counters[2]) + float(counters[10])
        return {"count_receive": receive, "count_transmit": transmit, "network_errors": errors}

    def _fabric(self) -> dict[str, float]:
        """InfiniBand and RoCE: their traffic passes by the kernel's own counters."""
        receive = transmit = errors = 0.0
        ports = sorted(self._infiniband.glob("*/ports/*/counters"))
        for port in ports:
            receive += float((port / "port_rcv_data").read_text()) * FABRIC_WORD_BYTES
            transmit += float((port / "port_xmit_data").read_text()) * FABRIC_WORD_BYTES
            for name in FABRIC_ERRORS:
                with suppress(OSError, ValueError):  # not every card has all of them
                    errors += float((port / name).read_text())
        if not ports:
            return {}
        return {
            "count_fabric_receive": receive,
            "count_fabric_transmit": transmit,
            "infiniband_errors": errors,
        }

    def _kills(self) -> dict[str, float]:
        for line in (self._proc / "vmstat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return {"out_of_memory_kills": float(value)}
        return {}
