"""What a device waits for copies, with a device that is played."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.checkpoint.write import device_waits
from phalanx.checkpoint.write.device_waits import DeviceWaits


class PlayedDevice:
    """A stream with a clock; events pass when it has come to them."""

    def __init__(self) -> None:
        self.queued, self.passed = 0.0, 0.0  # milliseconds
        self.made = 0

    def event(self, copied_at: float = 0.0) -> Any:
        device, self.made = self, self.made + 1

        class Event:
            at = 0.0

            def record(self) -> None:
                self.at = device.queued

            def wait(self) -> None:
                device.queued = max(device.queued, copied_at)

            def query(self) -> bool:
                return device.passed >= self.at

            def elapsed_time(self, other: Any) -> float:
                return float(other.at - self.at)

        return Event()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> PlayedDevice:
    played = PlayedDevice()
    monkeypatch.setattr(device_waits, "new_event", played.event)
    return played


def test_only_what_the_copy_took_longer_counts(device: PlayedDevice) -> None:
    waits = DeviceWaits()
    device.queued = 200.0
    waits.wait(device.event(copied_at=300.0))
    assert waits.passed() == []  # the host is ahead
    device.passed = 250.0
    assert waits.passed() == []
    device.passed = 300.0
    assert waits.passed() == [pytest.approx(0.1)]
    waits.wait(device.event(copied_at=150.0))
    assert waits.passed() == [0.0]


def test_events_are_used_again(device: PlayedDevice) -> None:
    waits = DeviceWaits()
    for _ in range(5):
        waits.wait(device.event())
        assert len(waits.passed()) == 1
    assert device.made == 5 + 2
