"""What GPUs do, by NVML and, where dcgm-exporter runs, by DCGM's activity counters.

A card or a driver that does not know something leaves that out; counters become rates between
two looks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from phalanx.observe.node.dcgm import ACTIVITY, Dcgm

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
    "gpu_pcie_replays",
    "gpu_nvlink_receive_bytes_per_second",
    "gpu_nvlink_transmit_bytes_per_second",
    "gpu_nvlink_errors",
    *ACTIVITY.values(),
)
ALL_LINKS = 0xFFFFFFFF  # the scope of an NVLink field: every link together
NVLINK_RATES = {  # field of NVML, a counter in KiB
    139: "gpu_nvlink_receive_bytes_per_second",
    138: "gpu_nvlink_transmit_bytes_per_second",
}
NVLINK_ERRORS = (38, 45, 52, 59)  # flit and data checksums, replays, recoveries; of all lanes
_VALUES = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal"}  # by type


class Gpus:
    """Looks again and again; ``nvml`` is None on a node without."""

    def __init__(self, nvml: Any, dcgm: Dcgm | None = None) -> None:
        self._nvml, self._dcgm = nvml, dcgm
        self._before: dict[tuple[int, str], float] = {}
        self._at = 0.0

    def look(self) -> dict[str, tuple[float, ...]]:
        """By metric, a value a GPU; NaN where one is not known."""
        nvml = self._nvml
        if nvml is None:
            return {}
        now, before, self._counters = time.monotonic(), self._before, dict[tuple[int, str], float]()
        try:
            handles = [
                nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
            ]
            looks = [self._gpu(index, handle) for index, handle in enumerate(handles)]
        except nvml.NVMLError:
            return {}
        seconds = now - self._at if self._at else 0.0
        for (index, name), count in self._counters.items():
            last = before.get((index, name), math.inf)
            if seconds > 0 and count >= last:  # one that went back says nothing
                looks[index][name] = (count - last) / seconds
        self._before, self._at = self._counters, now
        if self._dcgm is not None:
            for index, known in enumerate(self._dcgm.look([self._uuid(each) for each in handles])):
                looks[index] |= known
        return {name: tuple(look.get(name, math.nan) for look in looks) for name in GPU}

    def _uuid(self, handle: Any) -> str:
        try:
            uuid = self._nvml.nvmlDeviceGetUUID(handle)
        except self._nvml.NVMLError:
            return ""
        return uuid.decode() if isinstance(uuid, bytes) else str(uuid)

    def _gpu(self, index: int, handle: Any) -> dict[str, float]:
        nvml, sample = self._nvml, dict[str, float]()
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
            "gpu_pcie_replays": lambda: nvml.nvmlDeviceGetPcieReplayCounter(handle),
        }
        for name, ask in asks.items():
            with suppress(nvml.NVMLError):  # not every card knows everything
                sample[name] = float(ask())
        with suppress(nvml.NVMLError, AttributeError):
            sample |= self._nvlink(index, handle)
        return sample

    def _nvlink(self, index: int, handle: Any) -> dict[str, float]:
        fields = [(field, ALL_LINKS) for field in NVLINK_RATES] + [(f, 0) for f in NVLINK_ERRORS]
        errors: list[float] = []
        for value in self._nvml.nvmlDeviceGetFieldValues(handle, fields):
            if value.nvmlReturn or value.valueType not in _VALUES:
                continue
            number = float(getattr(value.value, _VALUES[value.valueType]))
            if value.fieldId in NVLINK_RATES:
                self._counters[index, NVLINK_RATES[value.fieldId]] = number * 1024
            else:
                errors.append(number)
        return {"gpu_nvlink_errors": sum(errors)} if errors else {}


def open_nvml() -> Any:
    """NVML, or None: no module, no driver, or one that is broken."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return None
    return pynvml
