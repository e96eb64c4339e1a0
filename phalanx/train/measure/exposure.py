"""Exposed communication: the time in which collectives ran and this rank calculated nothing.

It is read from the profiler's raw events. On CUDA a collective is a kernel of NCCL, or a copy
between devices; compute is every other kernel. On CPU a collective is a ``gloo:`` event, from when
it is taken up until its result is there; compute is what the main thread calculates outside of its
waits. A collective that waits for a slower peer is under way, so such waiting is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
from torch._C._autograd import DeviceType

from phalanx.train.measure.intervals import Interval, subtract, total

# What calculates on the main thread; compiled blocks run kernels that have no event of their own.
_CPU_COMPUTE = ("aten::", "Torch-Compiled Region")
_CPU_WAITS = ("c10d::", "_c10d_functional::")


class TraceEvent(Protocol):
    """One raw event of torch's profiler."""

    def name(self) -> str: ...
    def device_type(self) -> DeviceType: ...
    def start_ns(self) -> int: ...
    def duration_ns(self) -> int: ...
    def start_thread_id(self) -> int: ...


class DeviceActivity(NamedTuple):
    """When collectives were under way and when something was calculated, in seconds."""

    communication: list[Interval]
    compute: list[Interval]


class Communication(msgspec.Struct, frozen=True):
    """Time of collectives in one step, and the part that no compute hid."""

    seconds_per_step: float
    exposed_seconds_per_step: float


def communication(activity: DeviceActivity, steps: int) -> Communication:
    """Measure collectives against the compute that ran at the same time."""
    exposed = subtract(activity.communication, activity.compute)
    return Communication(total(activity.communication) / steps, total(exposed) / steps)


def activity_of(events: Sequence[TraceEvent]) -> DeviceActivity | None:
    """What a trace says; None where it holds no compute, as when another tool has the device."""
    device = [event for event in events if event.device_type() == DeviceType.CUDA]
    found = _on_cuda(device) if device else _on_cpu(events)
    return found if found.compute else None


def _on_cuda(kernels: Sequence[TraceEvent]) -> DeviceActivity:
    activity = DeviceActivity([], [])
    for kernel in kernels:
        name = kernel.name().lower()
        if "nccl" in name or name.startswith("memcpy ptop"):
            activity.communication.append(_span(kernel))
        elif not name.startswith(("memcpy", "memset")):  # moving state to the host hides nothing
            activity.compute.append(_span(kernel))
    return activity


def _on_cpu(events: Sequence[TraceEvent]) -> DeviceActivity:
    talking = [_span(event) for event in events if event.name().startswith("gloo:")]
    working = [event for event in events if event.name().startswith(_CPU_COMPUTE)]
    threads = Counter(event.start_thread_id() for event in working)
    if not threads:
        return DeviceActivity(talking, [])
    ((main, _),) = threads.most_common(1)
    spans = [_span(event) for event in working if event.start_thread_id() == main]
    waits = [_span(event) for event in events if event.name().startswith(_CPU_WAITS)]
    return DeviceActivity(talking, subtract(spans, waits))


def _span(event: TraceEvent) -> Interval:
    start = event.start_ns()
    return start / 1e9, (start + event.duration_ns()) / 1e9
