"""What a node's devices do: CPU, memory, disks, network, and GPUs where NVML is there.

Read by the agent every few seconds; counters become rates between two looks. Whatever cannot be
read is left out: a driver that hangs or a file that is missing costs its own numbers alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

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
    "out_of_memory_kills",
)
GPU = (
    "gpu_utilization",
    "gpu_memory_used_bytes",
    "gpu_temperature_celsius",
    "gpu_power_watts",
    "gpu_sm_clock_megahertz",
    "gpu_memory_clock_megahertz",
    "gpu_ecc_uncorrected",
    "gpu_ecc_corrected",
    "gpu_throttle_reasons",
    "gpu_pcie_receive_bytes_per_second",
    "gpu_pcie_transmit_bytes_per_second",
)
LOOPBACK = "lo"


class NodeSample(Struct, frozen=True, kw_only=True, tag_field="kind", tag=True):
    """One look at a node, as its agent sends it."""

    node: int
    time_ns: int
    host: dict[str, float]
    gpus: dict[str, tuple[float, ...]] = {}  # by metric, a value a GPU


class Sampler:
    """Looks again and again. ``proc`` is another folder in tests."""

    def __init__(self, folder: Path, proc: Path = Path("/proc"), gpus: bool = True) -> None:
        self._folder, self._proc = folder, proc
        self._nvml: Any = _open_nvml() if gpus else None
        self._before: dict[str, float] = {}
        self._at = 0.0

    def look(self) -> tuple[dict[str, float], dict[str, tuple[float, ...]]]:
        """Values of the host and of its GPUs."""
        host: dict[str, float] = {}
        for read in (self._cpu, self._memory, self._disk, self._network, self._kills):
            with suppress(OSError, ValueError, IndexError, KeyError):
                host |= read()
        now = time.monotonic()
        rates = self._rates(host, now - self._at if self._at else 0.0)
        self._at = now
        return rates, self._gpus()

    def _rates(self, host: dict[str, float], seconds: float) -> dict[str, float]:
        """Counters as rates; a counter that went back (a driver loaded anew) gives none."""
        counters = {name: host.pop(name) for name in list(host) if name.startswith("count_")}
        before, self._before = self._before, counters
        passed = {n: v - before[n] for n, v in counters.items() if n in before and v >= before[n]}
        if seconds > 0 and "count_receive" in passed and "count_transmit" in passed:
            host["network_receive_bytes_per_second"] = passed["count_receive"] / seconds
            host["network_transmit_bytes_per_second"] = passed["count_transmit"] / seconds
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
        found = {}
        for line in (self._proc / "meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            found[name] = float(rest.split()[0]) * 1024
        return {
            "memory_total_bytes": found["MemTotal"],
            "memory_used_bytes": found["MemTotal"] - found["MemAvailable"],
            "swap_used_bytes": found["SwapTotal"] - found["SwapFree"],
        }

    def _disk(self) -> dict[str, float]:
        status = os.statvfs(self._folder)
        return {"disk_free_bytes": float(status.f_bavail * status.f_frsize)}

    def _network(self) -> dict[str, float]:
        receive = transmit = errors = 0.0
        for line in (self._proc / "net" / "dev").read_text().splitlines()[2:]:
            name, _, rest = line.partition(":")
            words = rest.split()
            if name.strip() != LOOPBACK:
                receive, transmit = receive + float(words[0]), transmit + float(words[8])
                errors += float(words[2]) + float(words[10])
        return {"count_receive": receive, "count_transmit": transmit, "network_errors": errors}

    def _kills(self) -> dict[str, float]:
        for line in (self._proc / "vmstat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return {"out_of_memory_kills": float(value)}
        return {}

    def _gpus(self) -> dict[str, tuple[float, ...]]:
        if self._nvml is None:
            return {}
        try:
            count = self._nvml.nvmlDeviceGetCount()
            looks = [self._gpu(self._nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(count)]
        except self._nvml.NVMLError:
            return {}
        return {name: tuple(look.get(name, float("nan")) for look in looks) for name in GPU}

    def _gpu(self, handle: Any) -> dict[str, float]:
        nvml, found = self._nvml, dict[str, float]()
        asks: dict[str, Callable[[], float]] = {
            "gpu_utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "gpu_memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "gpu_temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, 0),
            "gpu_power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "gpu_sm_clock_megahertz": lambda: nvml.nvmlDeviceGetClockInfo(handle, 1),
            "gpu_memory_clock_megahertz": lambda: nvml.nvmlDeviceGetClockInfo(handle, 2),
            "gpu_ecc_uncorrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, 1, 0),
            "gpu_ecc_corrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, 0, 0),
            "gpu_throttle_reasons": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
            "gpu_pcie_receive_bytes_per_second": lambda: (
                nvml.nvmlDeviceGetPcieThroughput(handle, 1) * 1024
            ),
            "gpu_pcie_transmit_bytes_per_second": lambda: (
                nvml.nvmlDeviceGetPcieThroughput(handle, 0) * 1024
            ),
        }
        for name, ask in asks.items():
            with suppress(nvml.NVMLError):  # not every card knows everything
                found[name] = float(ask())
        return found


def _open_nvml() -> Any:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no module, no driver, or one that is broken: the node has no GPU numbers
        return None
    return pynvml
