"""Seconds go to the phase they were spent in."""

from __future__ import annotations

import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from phalanx.train.measure import timing
from phalanx.train.measure.timing import StepTimer
from tests.train.measure.fake_device import FakeDevice


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(timing, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_phases_add_up_over_micro_batches(clock: Clock) -> None:
    timer = StepTimer(torch.device("cpu"))
    for _ in range(3):
        with timer.phase("forward"):
            clock.now += 1
        with timer.phase("backward"):
            clock.now += 2
    clock.now += 0.5  # in no phase, but in the step
    timer.close_step()
    (step,) = timer.drain()
    assert (step.parts.forward, step.parts.backward, step.seconds) == (3, 6, 9.5)
    assert step.parts.optimizer == 0


def test_each_step_has_its_own_phases(clock: Clock) -> None:
    timer = StepTimer(torch.device("cpu"))
    for seconds in (1.0, 2.0, 4.0):
        with timer.phase("data"):
            clock.now += seconds
        timer.close_step()
    assert [step.parts.data for step in timer.drain()] == [1.0, 2.0, 4.0]
    assert timer.drain() == []


def test_what_passes_between_steps_can_be_left_out(clock: Clock) -> None:
    timer = StepTimer(torch.device("cpu"))
    timer.close_step()
    clock.now += 50  # a validation
    timer.restart()
    clock.now += 1
    timer.close_step()
    assert [step.seconds for step in timer.drain()] == [0, 1]


def test_a_phase_that_raises_is_still_closed(clock: Clock) -> None:
    timer = StepTimer(torch.device("cpu"))
    with suppress(RuntimeError), timer.phase("forward"):
        clock.now += 1
        raise RuntimeError
    timer.close_step()
    assert timer.drain()[0].parts.forward == 1


def test_phases_of_a_device_are_ranges_for_whoever_traces_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pushed: list[str] = []
    nvtx = SimpleNamespace(range_push=pushed.append, range_pop=lambda: pushed.append("."))
    monkeypatch.setattr(torch.cuda, "nvtx", nvtx)
    timer = StepTimer(torch.device("cuda"), device_clock=FakeDevice().clock())
    with timer.phase("forward"), suppress(RuntimeError), timer.phase("data"):
        raise RuntimeError
    assert pushed == ["forward", "data", ".", "."]


def test_a_ranks_own_work_leaves_out_waits_for_data_and_peers_but_not_its_sleep() -> None:
    timer = StepTimer(torch.device("cpu"), peer_waits=True)
    timer.restart()
    with timer.phase("data"):
        time.sleep(0.05)
    assert timer.so_far("data") >= 0.05
    with timer.phase("forward"):
        time.sleep(0.1)  # a slow device, as its peers see it
    begun = timer.wait_begins()
    time.sleep(0.02)
    timer.wait_ends(begun)
    timer.close_step()
    (step,) = timer.drain()
    assert step.parts.peer_wait is not None and step.parts.own is not None
    assert step.parts.peer_wait >= 0.02
    assert step.parts.own <= step.seconds - 0.05 - step.parts.peer_wait + 0.001
    assert step.parts.own > 0
