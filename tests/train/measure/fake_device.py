"""A device with a clock of its own, for tests without one."""

from __future__ import annotations

from phalanx.train.measure.device_clock import DeviceClock

COMPUTE_STREAM = 0


class FakeDevice:
    """Does what its host gives it, in order, as soon as it has it; both have their own time."""

    def __init__(self, ahead: float = 1000.0) -> None:
        self.host = 0.0
        self.busy = 0.0  # until when, on the host's clock
        self.ahead = ahead  # of the host's clock
        self.stream = COMPUTE_STREAM  # to which the host gives its work now
        self.events = self.waits = 0

    def clock(self) -> DeviceClock:
        """The clock under test."""
        return DeviceClock(lambda: FakeEvent(self), lambda: self.stream, lambda: self.host)

    def issue(self, seconds: float) -> None:
        """The host works."""
        self.host += seconds

    def kernel(self, seconds: float) -> None:
        """The device works, as soon as it may."""
        self.busy = self.reaches() + seconds

    def wait_until(self, time: float) -> None:
        """The stream goes on when a peer is there."""
        self.busy = max(self.reaches(), time)

    def reaches(self) -> float:
        """When the device reaches what it is given now."""
        return max(self.busy, self.host)


class FakeEvent:
    """An event of such a device."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        device.events += 1

    def record(self) -> None:
        self.time = self.device.reaches()

    def query(self) -> bool:
        return self.time <= self.device.host

    def synchronize(self) -> None:
        self.device.waits += 1
        self.device.host = max(self.device.host, self.time)

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.query() and end_event.query(), "read before the device got there"
        return 1000 * ((end_event.time + self.device.ahead) - (self.time + self.device.ahead))
