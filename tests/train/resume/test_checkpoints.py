"""What saves cost is told with the step that it held up, and thins snapshots on CUDA."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.config import job_from_table
from phalanx.train.report.records import StepWaits
from phalanx.train.resume import checkpoints
from phalanx.train.resume.checkpoints import Checkpoints
from phalanx.train.resume.pace import FIRST_STEPS

STEP = 0.2  # seconds


class PlayedRun:
    """Steps of a run under an agent; the clock shows what the test says they take."""

    def __init__(self, patch: pytest.MonkeyPatch, device: str = "cuda", **checkpoint: Any) -> None:
        self.now, self.save_seconds, self.update_waits = 0.0, 0.0, 0.0
        self.saved: list[int] = []
        self.told: list[StepWaits] = []
        patch.setattr(checkpoints.time, "perf_counter", lambda: self.now)
        job = job_from_table({"checkpoint": {"interval": "off", "at_end": False, **checkpoint}})
        timer = SimpleNamespace(phase=lambda name: nullcontext(), so_far=lambda name: 0.0)
        self.trainer: Any = SimpleNamespace(
            job=job, step=0, device=torch.device(device), timer=timer, generation=1,
            tensors=dict, extra=lambda: None,
        )  # fmt: skip
        self.checkpointer: Any = SimpleNamespace(
            prompt=True, in_background=True, bytes_per_second=0.0, flush_seconds=0.0,
            poll=list, save=self._save, take_waited=self._take, agreed=lambda value: value,
            largest=lambda values: values,
        )  # fmt: skip
        orders = SimpleNamespace(failure_rate=lambda: None, stepped=self._stepped)
        self.run: Any = SimpleNamespace(orders=orders, is_last=lambda outcome: False)
        self.callback = Checkpoints(self.trainer, self.checkpointer)
        self.callback.begin(self.run)

    def _save(self, step: int, *_: Any, **__: Any) -> str:
        self.saved.append(step)
        self.now += self.save_seconds
        return ""

    def _take(self) -> float:
        """The update of this step waited for the copy of the last one, if there was one."""
        return self.update_waits if self.trainer.step - 1 in self.saved else 0.0

    def _stepped(self, step: int, durable: int, seconds: StepWaits) -> None:
        self.told.append(seconds)

    def steps(self, count: int) -> None:
        outcome: Any = SimpleNamespace(failure_rate=0, keepers_late=False, stop=False)
        for _ in range(count):
            self.callback.before_step(self.run)
            copying = self.trainer.step in self.saved
            self.trainer.step += 1
            self.now += STEP + (self.update_waits if copying else 0.0)
            self.callback.after_step(self.run, outcome)


def test_a_step_without_a_save_was_held_up_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedRun(monkeypatch, memory_every=3)
    played.save_seconds = 0.5
    played.steps(6)
    assert [waits.stall for waits in played.told] == pytest.approx([0, 0, 0.5, 0, 0, 0.5])


def test_an_update_that_waits_for_a_copy_is_held_up_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = PlayedRun(monkeypatch, memory_every=3)
    played.update_waits = 0.1
    played.steps(5)
    assert [waits.stall for waits in played.told] == pytest.approx([0, 0, 0, 0.1, 0])


def test_snapshots_that_cannot_be_hidden_are_thinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    played = PlayedRun(monkeypatch)
    played.update_waits = 0.1
    played.steps(FIRST_STEPS + 60)
    assert played.saved[:FIRST_STEPS] == list(range(1, FIRST_STEPS + 1))
    assert played.saved[-3:] == [34, 51, 68] and played.run.snapshot_every == 17
    assert "a failure costs up to 17 steps" in caplog.text
    cost = sum(waits.stall for waits in played.told[-51:])
    assert cost / (51 * STEP) <= 0.03


def test_hidden_snapshots_stay_with_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedRun(monkeypatch)
    played.update_waits = 0.001
    played.steps(30)
    assert played.saved == list(range(1, 31)) and played.run.snapshot_every == 1


@pytest.mark.parametrize(
    ("device", "settings", "every"),
    [("cuda", {"memory_every": 1}, 1), ("cuda", {"memory_share": 0.0}, 1), ("cpu", {}, 1)],
)
def test_whoever_says_how_many_gets_them(
    monkeypatch: pytest.MonkeyPatch, device: str, settings: dict[str, Any], every: int
) -> None:
    played = PlayedRun(monkeypatch, device, **settings)
    played.update_waits = 0.1
    played.steps(30)
    assert len(played.saved) == 30 // every


def test_without_keepers_nothing_is_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedRun(monkeypatch)
    played.checkpointer.in_background = False
    played.steps(2)
    assert played.saved == [] and played.run.snapshot_every == 0
