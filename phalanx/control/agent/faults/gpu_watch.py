"""GPUs: the driver's events as they come (NVML), and what changed between two looks at them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from phalanx.cluster.causes import Cause
from phalanx.cluster.protocol.messages import THIS_NODE, DeviceError
from phalanx.control.agent.faults.xid import xid_fault
from phalanx.doctor.gpus import BRAKE, HOT, GpuFacts, read_gpus

WAIT_MILLISECONDS = 1000

log = logging.getLogger("phalanx.agent")


def gpu_faults(before: list[GpuFacts], after: list[GpuFacts]) -> list[DeviceError]:
    """What became worse between two looks; what was bad at the first is the doctor's to judge."""
    now = {facts.index: facts for facts in after}
    return [
        DeviceError(node=THIS_NODE, cause=cause, gpu=was.index, detail=detail)
        for was in before
        for cause, detail in _worse(was, now.get(was.index))
    ]


def _worse(was: GpuFacts, facts: GpuFacts | None) -> Iterator[tuple[Cause, str]]:
    if facts is None:
        yield Cause.GPU_UNAVAILABLE, "the driver lost it"
        return
    if facts.uncorrected > max(0, was.uncorrected):
        before = max(0, was.uncorrected)
        yield Cause.HBM_ECC, f"{facts.uncorrected} uncorrectable errors, {before} before"
    if facts.remap_failed and not was.remap_failed:
        yield Cause.HBM_ECC, "a row of memory could not be remapped"
    if facts.links_down > was.links_down:
        yield Cause.NVLINK, f"{facts.links_down} NVLinks are down, {was.links_down} before"
    bad = facts.throttle & (HOT | BRAKE)
    if bad and not was.throttle & bad:
        why = "too hot" if bad & HOT else "power brake"
        # Not "power": a brake slows the GPU down, the node has not lost its power.
        detail = f"{why}: clocks are lowered (reasons {bad:#x}) at {facts.degrees} degrees"
        yield Cause.THERMAL, detail


class GpuMonitor:
    """Looks again and again, each time since the last."""

    def __init__(self) -> None:
        self._before = read_gpus()

    def look(self) -> list[DeviceError]:
        after = read_gpus()
        found = gpu_faults(self._before, after)
        self._before = after
        return found


def event_fault(kind: int, data: int, gpu: int, nvml: Any) -> DeviceError | None:
    """The fact behind an event of NVML."""
    if kind == nvml.nvmlEventTypeXidCriticalError:
        return xid_fault(data, gpu, "reported by NVML")
    if kind == nvml.nvmlEventTypeDoubleBitEccError:
        detail = "double bit ECC error, reported by NVML"
        return DeviceError(node=THIS_NODE, cause=Cause.HBM_ECC, gpu=gpu, detail=detail)
    return None


class NvmlEvents:
    """Listens in a thread of its own; nothing where the module or the driver is not there."""

    def __init__(self, heard: Callable[[DeviceError], object]) -> None:
        self._heard = heard
        self._ended = threading.Event()

    def start(self) -> bool:
        """Whether there is something to listen to."""
        try:
            import pynvml
        except ImportError:
            return False
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return False
        threading.Thread(target=self._listen, args=(pynvml,), daemon=True).start()
        return True

    def close(self) -> None:
        self._ended.set()

    def _listen(self, nvml: Any) -> None:
        events = nvml.nvmlEventSetCreate()
        wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            try:
                nvml.nvmlDeviceRegisterEvents(handle, wanted, events)
            except nvml.NVMLError as error:
                log.warning("GPU %d reports no events: %s", index, error)
        while not self._ended.is_set():
            try:
                event = nvml.nvmlEventSetWait_v2(events, WAIT_MILLISECONDS)
                index = nvml.nvmlDeviceGetIndex(event.device)
            except nvml.NVMLError_Timeout:
                continue
            except nvml.NVMLError as error:
                log.warning("NVML's events ended: %s", error)
                return
            fault = event_fault(event.eventType, event.eventData, index, nvml)
            if fault is not None:
                self._heard(fault)
