"""When a device reached the points of a step, told by events that nobody waits for.

An event is recorded on the stream that computes, and read when the device has long passed it. Each
remembers when the host recorded it, too. How much later the device reaches a point tells how much
work it had left. What it did between two points before the host had given it all of that, it did at
the host's pace (or at that of the data that the host waits for).
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple, Protocol, cast

import torch

from phalanx.train.measure.wait_hooks import watch


class DeviceEvent(Protocol):
    """A CUDA event."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: DeviceEvent) -> float: ...


class Mark:
    """A point of the stream that computes."""

    __slots__ = ("at", "event", "host", "idle", "leaves")

    def __init__(self, event: DeviceEvent, host: float, *, idle: bool, leaves: bool) -> None:
        self.event, self.host = event, host
        self.idle = idle  # the device had nothing to do: it reaches this at once
        self.leaves = leaves  # here it goes on after it waited for peers since the mark before
        self.at = 0.0  # seconds after its step's start, once read


class DeviceStep(NamedTuple):
    """What one step's marks say, in seconds."""

    seconds: float
    waited: float  # for peers
    paced: float  # at the host's pace
    host_seconds: float  # that the host took, without what it was blocked for peers


class Device(Protocol):
    """A device and the host that gives it work."""

    def host(self) -> float:
        """The host's clock."""

    def event(self) -> DeviceEvent: ...
    def record(self, event: DeviceEvent) -> None:
        """On the stream that computes."""

    def computes(self) -> bool:
        """Whether this thread gives its work to the stream that computes."""


class CudaDevice:
    """The current one. Every mark asks it, so handles are compared and no stream is looked up."""

    def __init__(self) -> None:
        self.host = perf_counter
        self._stream = torch.cuda.current_stream()
        self._handle, self._index = self._stream.cuda_stream, torch.cuda.current_device()

    def event(self) -> DeviceEvent:
        return cast(DeviceEvent, torch.cuda.Event(enable_timing=True))

    def record(self, event: DeviceEvent) -> None:
        cast(torch.cuda.Event, event).record(self._stream)

    def computes(self) -> bool:
        handle: int = torch._C._cuda_getCurrentRawStream(self._index)
        return handle == self._handle


class DeviceClock:
    """Marks on the stream that computes; events are reused once read. Watches waits for peers."""

    def __init__(self, device: Device | None = None) -> None:
        self._device = device or CudaDevice()
        self.host = self._device.host
        self._free: list[DeviceEvent] = []
        self._marks: list[Mark] = []  # of the step under way
        self._idle = True
        self._anchor: tuple[Mark, float] | None = None  # the start read last, and its time
        self._zero: float | None = None  # the device's clock less the host's

    def watch_waits(self) -> None:
        """From now on waits for peers are marked."""
        watch(self)

    def mark(self, *, leaves: bool = False) -> Mark:
        """The stream's work up to here; nothing waits."""
        event = self._free.pop() if self._free else self._device.event()
        mark = Mark(event, self.host(), idle=self._idle, leaves=leaves)
        self._idle = False
        self._device.record(event)
        self._marks.append(mark)
        return mark

    def wait_begins(self) -> Mark | None:
        """The stream that computes is about to wait for peers; other streams hide theirs."""
        return self.mark() if self._device.computes() else None

    def wait_ends(self, begun: Mark) -> None:
        self.mark(leaves=True)

    def take(self) -> list[Mark]:
        """The marks since the last call: a step's, its start and its end included."""
        marks, self._marks = self._marks, []
        return marks

    def seconds(self, start: Mark, end: Mark) -> float:
        """Between two marks that the device has passed."""
        return start.event.elapsed_time(end.event) / 1000.0

    def release(self, marks: Sequence[Mark]) -> None:
        """Their events may be recorded anew."""
        self._free.extend(mark.event for mark in marks)

    def passed(self, mark: Mark) -> bool:
        """Whether the device was here; never waits."""
        return mark.event.query()

    def wait(self, mark: Mark) -> None:
        """The device was here, and has nothing to do until it is told."""
        mark.event.synchronize()
        self._idle = True

    def read(self, marks: Sequence[Mark]) -> DeviceStep:
        """A step whose marks the device has passed, and which are not read again.

        Steps are read in their order.
        """
        start = marks[0]
        for mark in marks[1:]:
            mark.at = self.seconds(start, mark)
        began = self._device_time(start)
        lags = [began + mark.at - mark.host for mark in marks]
        for lag, mark in zip(lags, marks, strict=True):
            if mark.idle or self._zero is None or lag < self._zero:
                self._zero = lag  # which shows how far apart the two clocks are
        assert self._zero is not None
        waited = paced = blocked = 0.0
        for i in range(1, len(marks)):
            span = marks[i].at - marks[i - 1].at
            if marks[i].leaves:
                waited += span
                blocked += marks[i].host - marks[i - 1].host
            else:
                paced += max(0.0, span - (lags[i] - self._zero))
        self.release(marks[1:])
        return DeviceStep(marks[-1].at, waited, paced, marks[-1].host - start.host - blocked)

    def _device_time(self, start: Mark) -> float:
        """Of a step's start, counted from start to start: an event's own times are not exact
        over hours. This one is kept until the next."""
        time = 0.0
        if self._anchor is not None:
            before, time = self._anchor
            time += self.seconds(before, start)
            self.release([before])
        self._anchor = start, time
        return time
