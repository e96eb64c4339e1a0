"""A device with a clock of its own, for tests without one."""

from __future__ import annotations

from phalanx.train.measure.device_clock import DeviceClock, DeviceEvent

COMPUTE_STREAM = 0


class FakeDevice:
    """Does what its host gives it, in order, as soon as it has it; both have their own time."""

    def __init__(self, ahead: float = 1000.0) -> None:
        self.now = 0.0  # on the host's clock
        self.busy = 0.0  # until when, on that clock
        self.ahead = ahead  # of the host's clock
        self.stream = COMPUTE_STREAM  # to which the host gives its work now
        self.events = self.waits = 0

    def clock(self) -> DeviceClock:
        """The clock under test."""
        return DeviceClock(self)

    def host(self) -> float:
        return self.now

    def event(self) -> FakeEvent:
        self.events += 1
        return FakeEvent(self)

    def record(self, event: DeviceEvent) -> None:
        assert isinstance(event, FakeEvent)
        event.time = self.reaches()

    def computes(self) -> bool:
        return self.stream == COMPUTE_STREAM

    def issue(self, seconds: float) -> None:
        """The host works."""
        self.now += seconds

    def kernel(self, seconds: float) -> None:
        """The device works, as soon as it may."""
        self.busy = self.reaches() + seconds

    def wait_until(self, time: float) -> None:
        """The stream goes on when a peer is there."""
        self.busy = max(self.reaches(), time)

    def reaches(self) -> float:
        """When the device reaches what it is given now."""
        return max(self.busy, self.now)


class FakeEvent:
    """An event of such a device."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.time = device, 0.0

    def query(self) -> bool:
        return self.time <= self.device.now

    def synchronize(self) -> None:
        self.device.waits += 1
        self.device.now = max(self.device.now, self.time)

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.query() and end_event.query(), "read before the device got there"
        return 1000 * ((end_event.time + self.device.ahead) - (self.time + self.device.ahead))
