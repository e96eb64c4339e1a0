"""A keeper that does not answer: training waits for the snapshot deadline once, then goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from phalanx.checkpoint import Checkpointer, Extra
from phalanx.checkpoint.write import deadline
from phalanx.checkpoint.write.deadline import LEAST_SECONDS, SLACK, SnapshotDeadline
from phalanx.data import Cursor
from tests.checkpoint.waiting import eventually, newest_child

EXTRA = Extra(tokens=1, cursor=Cursor(), mesh={}, config_hash="h")
SHORT_SECONDS = 1.5


def test_the_deadline_follows_what_is_usual_and_no_single_stop() -> None:
    found = SnapshotDeadline(shard_bytes=1 << 20)
    assert found.seconds == LEAST_SECONDS
    for seconds in (2.0, 2.0, 30.0):
        found.acknowledged(seconds)
    assert found.seconds == SLACK * 2.0


def test_a_large_snapshot_is_given_its_time_before_anything_is_measured() -> None:
    assert SnapshotDeadline(shard_bytes=10**10).seconds > 100


@pytest.fixture
def prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checkpointer]:
    """A checkpointer whose snapshots are safe in memory first, with a short deadline."""
    monkeypatch.setattr(deadline, "LEAST_SECONDS", SHORT_SECONDS)
    checkpointer = Checkpointer(tmp_path)
    made = checkpointer.prepare_background(
        {"x": torch.zeros(1000)},
        generation=1,
        step=0,
        device=torch.device("cpu"),
        buffers=4,
        lease_seconds=1.0,
        prompt=True,
    )
    assert made
    yield checkpointer
    checkpointer.close()


@pytest.fixture
def keeper(prompt: Checkpointer) -> Iterator[psutil.Process]:
    """Its keeper, which goes on in the end."""
    process = newest_child()
    yield process
    if process.is_running():
        process.send_signal(signal.SIGCONT)


def take(prompt: Checkpointer, step: int, *, write: bool = False) -> float:
    """A snapshot of a step; how long training is held up by it."""
    began = time.monotonic()
    prompt.save(step, {"x": torch.full((1000,), float(step))}, EXTRA, write=write, patient=False)
    return time.monotonic() - began


def stop(keeper: psutil.Process) -> None:
    """A process hears the signal when it is next scheduled, not when it is sent."""
    keeper.suspend()
    while keeper.status() != psutil.STATUS_STOPPED:
        time.sleep(0.005)


def test_training_waits_once_for_a_keeper_that_stands_still(
    prompt: Checkpointer, keeper: psutil.Process
) -> None:
    take(prompt, 1)
    prompt.wait_acknowledged()
    stop(keeper)
    take(prompt, 2)  # nobody knows yet
    assert 0.5 < take(prompt, 3) < 20 and prompt.late
    assert sum(take(prompt, step) for step in range(4, 10)) < SHORT_SECONDS  # not even once more
    os.kill(keeper.pid, signal.SIGCONT)
    assert eventually(lambda: not (prompt.poll() or prompt.late))
    take(prompt, 10)
    assert not prompt.late  # it waited for this one: others may be two steps further


def test_a_checkpoint_that_a_late_keeper_misses_is_told(
    prompt: Checkpointer, keeper: psutil.Process
) -> None:
    take(prompt, 1)
    prompt.wait_acknowledged()
    stop(keeper)
    take(prompt, 2)
    take(prompt, 3, write=True)
    (outcome,) = prompt.poll()
    assert outcome.step == 3 and "has not answered" in outcome.problem


def test_a_keeper_that_is_gone_is_not_late(prompt: Checkpointer, keeper: psutil.Process) -> None:
    take(prompt, 1)
    prompt.wait_acknowledged()
    stop(keeper)
    take(prompt, 2)
    take(prompt, 3)
    assert prompt.late
    keeper.kill()
    assert eventually(lambda: not (prompt.poll() or prompt.late))
