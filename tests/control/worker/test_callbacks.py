"""Loops of other libraries report their steps through a callback."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phalanx.control.worker.callbacks import lightning_callback, transformers_callback
from phalanx.control.worker.client import WorkerClient


class FakeWorker:
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.stopping = False

    def stepped(self, step: int, **numbers: Any) -> None:
        self.said.append((step, {name: value for name, value in numbers.items() if value}))

    def busy(self, what: str) -> None:
        self.said.append((what,))


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> FakeWorker:
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(TrainerCallback=object))
    monkeypatch.setitem(sys.modules, "lightning", SimpleNamespace(Callback=object))
    return FakeWorker()


def control(**flags: bool) -> Any:
    usual = {"should_log": False, "should_evaluate": False, "should_save": False}
    return SimpleNamespace(should_training_stop=False, **{**usual, **flags})


def test_a_step_of_transformers_is_reported_with_what_is_logged_of_it(worker: FakeWorker) -> None:
    callback = transformers_callback(cast(WorkerClient, worker))
    state = SimpleNamespace(global_step=1, num_input_tokens_seen=0)
    callback.on_step_end(None, state, control())
    state.global_step, state.num_input_tokens_seen = 2, 640
    callback.on_step_end(None, state, control(should_log=True))
    callback.on_log(None, state, control(), logs={"eval_loss": 1.0})  # of something else
    logs = {"loss": 2.5, "grad_norm": float("nan"), "learning_rate": 1e-4, "epoch": 0.5}
    callback.on_log(None, state, control(), logs=logs)
    assert worker.said == [(1, {}), (2, {"loss": 2.5, "learning_rate": 1e-4, "tokens": 640})]


def test_a_step_of_transformers_whose_logs_never_come_is_reported_all_the_same(
    worker: FakeWorker,
) -> None:
    callback = transformers_callback(cast(WorkerClient, worker))
    for step in (1, 2):
        state = SimpleNamespace(global_step=step, num_input_tokens_seen=0)
        callback.on_step_end(None, state, control(should_log=True))
    callback.on_train_end(None, state, control())
    assert worker.said == [(1, {}), (2, {})]


def test_transformers_saves_and_stops_when_the_job_is_to_leave(worker: FakeWorker) -> None:
    callback = transformers_callback(cast(WorkerClient, worker))
    worker.stopping, flow = True, control()
    state = SimpleNamespace(global_step=3, num_input_tokens_seen=0)
    callback.on_step_end(None, state, flow)
    assert flow.should_save and flow.should_training_stop
    assert worker.said[-1] == ("an evaluation or a checkpoint",)


def test_lightning_reports_each_optimizer_step_once(worker: FakeWorker) -> None:
    callback = lightning_callback(cast(WorkerClient, worker))
    trainer = SimpleNamespace(global_step=1, callback_metrics={"loss": 0.5}, should_stop=False)
    callback.on_train_batch_end(trainer, None, None, None, 0)
    callback.on_train_batch_end(trainer, None, None, None, 1)  # gradients are accumulated
    callback.on_validation_start(trainer, None)
    worker.stopping, trainer.global_step, trainer.callback_metrics = True, 2, {}
    callback.on_train_batch_end(trainer, None, None, None, 2)
    assert worker.said == [(1, {"loss": 0.5}), ("a validation",), (2, {})]
    assert trainer.should_stop
