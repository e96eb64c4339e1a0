"""What events say of a step, on a device whose clock a test moves."""

from __future__ import annotations

import pytest
import torch

from phalanx.train.measure.timing import StepTime, StepTimer
from tests.train.measure.fake_device import FakeDevice

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: None)


def timer_of(device: FakeDevice) -> StepTimer:
    return StepTimer(CUDA, peer_waits=True, device_clock=device.clock())


def make_step(
    device: FakeDevice,
    timer: StepTimer,
    *,
    issue: float = 0.01,
    kernels: float = 0.4,
    late: float = 0.0,
) -> None:
    """Forward, a collective for which a peer comes so much later, backward."""
    with timer.phase("forward"):
        device.issue(issue)
        device.kernel(kernels)
    begun = timer.wait_begins()
    device.wait_until(device.reaches() + late)
    timer.wait_ends(begun)
    with timer.phase("backward"):
        device.issue(issue)
        device.kernel(kernels)
    timer.close_step()


def only(steps: list[StepTime]) -> StepTime:
    (step,) = steps
    return step


def test_a_wait_for_peers_is_no_work_of_its_own() -> None:
    device = FakeDevice()
    timer = timer_of(device)
    make_step(device, timer, late=0.2)
    step = only(timer.drain())
    assert step.seconds == pytest.approx(1.01)  # the host's first launch, then the device's work
    assert step.parts.peer_wait == pytest.approx(0.2)
    assert step.parts.own == pytest.approx(0.81)
    assert step.parts.forward == pytest.approx(0.41) and step.parts.backward == pytest.approx(0.4)


def test_a_device_behind_its_host_sets_the_pace_itself() -> None:
    device = FakeDevice()
    timer = timer_of(device)
    for _ in range(5):
        make_step(device, timer)
    *_, last = timer.drain()
    assert last.parts.own == pytest.approx(0.8)
    assert last.parts.host == 0.0


def test_a_device_that_waits_for_its_host_works_at_the_hosts_pace() -> None:
    device = FakeDevice()
    timer = timer_of(device)
    for _ in range(5):
        make_step(device, timer, issue=0.5, kernels=0.001)
    *_, last = timer.drain()
    assert last.parts.own == pytest.approx(1.0, rel=0.01)
    assert last.parts.host == pytest.approx(1.0, rel=0.01)
    assert last.parts.launch == pytest.approx(1.0, rel=0.01)


def test_a_host_that_stops_and_then_catches_up_is_the_hosts_fault() -> None:
    device = FakeDevice()
    timer = timer_of(device)
    make_step(device, timer)
    timer.drain()
    with timer.phase("forward"):
        device.issue(0.5)  # the device has nothing to do meanwhile
        for _ in range(4):
            device.issue(0.001)
            device.kernel(0.1)
    timer.close_step()
    step = only(timer.drain())
    assert step.parts.own == pytest.approx(0.9, abs=0.01)
    assert step.parts.host == pytest.approx(0.5, abs=0.01)


def test_a_host_that_is_blocked_for_peers_launches_nothing_meanwhile() -> None:
    device = FakeDevice()
    timer = timer_of(device)
    device.issue(0.02)
    begun = timer.wait_begins()
    device.issue(0.7)  # gloo
    timer.wait_ends(begun)
    timer.close_step()
    step = only(timer.drain())
    assert step.parts.peer_wait == pytest.approx(0.7)
    assert step.parts.launch == pytest.approx(0.02)
    assert step.parts.host == pytest.approx(0.02)


def test_the_clocks_are_compared_anew_after_each_interval() -> None:
    device = FakeDevice()
    timer = timer_of(device)
    for _ in range(4):
        for _ in range(5):
            make_step(device, timer, kernels=0.1)
        device.ahead += 0.3  # they drift apart; within an interval nobody can see it
        shares = [step.parts.host for step in timer.drain()]
    assert shares[1:] == [0.0] * 4


def test_data_that_a_busy_device_hides_are_no_loss_and_late_ones_are_nobodys_work() -> None:
    device = FakeDevice()
    timer = timer_of(device)
    make_step(device, timer)
    timer.drain()
    for seconds in (0.0, 0.3, 2.0):
        with timer.phase("data"):
            device.issue(seconds)
        make_step(device, timer)
    _, hidden, late = timer.drain()
    assert hidden.parts.data == pytest.approx(0.3)
    assert hidden.parts.own == pytest.approx(0.8)  # all of it was the device's own work
    assert late.parts.own == pytest.approx(0.8, abs=0.05)
    assert late.seconds > 1.3


def test_waits_of_other_streams_are_hidden_ones() -> None:
    device = FakeDevice()
    timer = timer_of(device)
    device.stream = 7
    assert timer.wait_begins() is None
    timer.wait_ends(None)
    device.stream = 0
    make_step(device, timer)
    assert only(timer.drain()).parts.peer_wait == pytest.approx(0.0)


def test_what_passed_before_a_restart_is_no_part_of_a_step() -> None:
    device = FakeDevice()
    timer = timer_of(device)
    timer.wait_ends(timer.wait_begins())
    device.kernel(9.0)  # a validation
    begun = timer.wait_begins()
    device.wait_until(30.0)
    timer.wait_ends(begun)
    device.now = 40.0
    timer.restart()
    make_step(device, timer, late=0.1)
    step = only(timer.drain())
    assert step.seconds == pytest.approx(0.91) and step.parts.peer_wait == pytest.approx(0.1)


def test_nothing_waits_for_the_device_and_events_are_reused_between_drains() -> None:
    device = FakeDevice()
    timer = timer_of(device)
    made = []
    for _ in range(200):
        make_step(device, timer, late=0.05)
        device.now = max(device.now, device.busy - 1.0)  # a host is some steps ahead, no more
        made.append(device.events)
    assert device.waits == 0
    assert made[-1] == made[20]  # what is passed is read at once, and its events serve again
    steps = timer.drain()
    assert device.waits == 1 and len(steps) == 200
    assert all(step.parts.peer_wait == pytest.approx(0.05) for step in steps)


def test_without_peers_only_phases_are_told() -> None:
    device = FakeDevice()
    timer = StepTimer(CUDA, device_clock=device.clock())
    assert timer.wait_begins() is None
    with timer.phase("forward"):
        device.kernel(0.25)
    timer.close_step()
    step = only(timer.drain())
    assert step.parts.forward == step.seconds == 0.25
    assert (step.parts.own, step.parts.peer_wait, step.parts.host) == (None, None, None)
