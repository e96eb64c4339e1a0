"""Traces of chosen steps, for a person to open in a trace viewer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Self

import msgspec
import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from phalanx.config import Log
from phalanx.train.run_folder import RunFolder


class StepProfiler:
    """Writes ``logs/trace-rank-N.json`` of the steps ``log.profile_steps = [first, last)``."""

    def __init__(self, log: Log, run_folder: RunFolder) -> None:
        self._steps = range(*log.profile_steps) if log.profile_steps else range(0)
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._path = run_folder.logs / f"trace-rank-{rank}.json"
        self._profile: profile | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        """The run may end before the last traced step: what there is, is kept."""
        if self._profile is not None:
            self._finish(self._profile)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Trace what runs inside if this step is asked for."""
        if step in self._steps and self._profile is None:
            self._profile = self._started()
        yield
        if self._profile is not None and step >= self._steps[-1]:
            self._finish(self._profile)

    def _started(self) -> profile:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        tracer = profile(activities=activities)
        tracer.start()
        return tracer

    def _finish(self, tracer: profile) -> None:
        self._profile = None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        tracer.stop()
        tracer.export_chrome_trace(str(self._path))
        kernels = [kernel_of(event) for event in tracer.events() or () if is_kernel(event)]
        if kernels:
            summary = msgspec.json.encode(communication(kernels, len(self._steps)))
            self._path.with_suffix(".communication.json").write_bytes(summary + b"\n")


class Kernel(NamedTuple):
    """When a kernel ran on the device."""

    start_seconds: float
    end_seconds: float
    communicates: bool


class Communication(msgspec.Struct, frozen=True):
    """Time of collectives on the device in one step, and the part that no compute hid."""

    seconds_per_step: float
    exposed_seconds_per_step: float


def is_kernel(event: FunctionEvent) -> bool:
    """Whether a profiled event ran on a CUDA device."""
    return event.device_type == DeviceType.CUDA


def kernel_of(event: FunctionEvent) -> Kernel:
    """When it ran; NCCL's kernels carry its name."""
    times = event.time_range
    return Kernel(times.start / 1e6, times.end / 1e6, "nccl" in event.name.lower())


def communication(kernels: Sequence[Kernel], steps: int) -> Communication:
    """Measure collectives against the compute that ran at the same time."""
    talking = _union(kernel for kernel in kernels if kernel.communicates)
    busy = _union(kernels)
    computing = _union(kernel for kernel in kernels if not kernel.communicates)
    return Communication(talking / steps, (busy - computing) / steps)


def _union(kernels: Iterable[Kernel]) -> float:
    """Seconds in which at least one of the kernels ran."""
    total = reached = 0.0
    for start, end, _ in sorted(kernels):
        start = max(start, reached)
        if end > start:
            total += end - start
            reached = end
    return total
