"""``phalanx.worker()`` for the loops of other libraries: a callback each, to be given to them.

    trainer = transformers.Trainer(..., callbacks=[phalanx.transformers_callback()])
    trainer = lightning.Trainer(..., callbacks=[phalanx.lightning_callback()])

Steps are reported as the library counts them, its evaluations and saves as such, and a job that is
to leave saves and stops at the next step. Snapshots stay the library's own. Outside of Phalanx they
do nothing.
"""

from __future__ import annotations

import math
from typing import Any

from phalanx.control.worker.client import WorkerClient


def transformers_callback(worker: WorkerClient | None = None) -> Any:
    """A ``transformers.TrainerCallback``."""
    from transformers import TrainerCallback

    client = worker or WorkerClient()

    class PhalanxCallback(TrainerCallback):
        """Reports each step; one that the trainer logs is reported with what it logs."""

        def __init__(self) -> None:
            self._logged = 0  # the step whose numbers are still to come; 0: none
            self._seen = 0  # tokens, in all

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self._logged:  # they never came
                self._report(self._logged, state, {})
            if control.should_log:
                self._logged = state.global_step
            else:
                self._report(state.global_step, state, {})
            if client.stopping:
                control.should_save = control.should_training_stop = True
            if control.should_evaluate or control.should_save:
                client.busy("an evaluation or a checkpoint")

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if self._logged == state.global_step and "loss" in (logs or {}):
                self._report(self._logged, state, logs)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self._logged:
                self._report(self._logged, state, {})

        def _report(self, step: int, state: Any, logs: dict[str, Any]) -> None:
            seen, self._logged = int(state.num_input_tokens_seen or 0), 0
            numbers = {name: float(value) for name, value in logs.items() if _is_number(value)}
            client.stepped(
                step,
                loss=numbers.get("loss"),
                grad_norm=numbers.get("grad_norm"),
                learning_rate=numbers.get("learning_rate", 0.0),
                tokens=max(0, seen - self._seen),
            )
            self._seen = seen

    return PhalanxCallback()


def lightning_callback(worker: WorkerClient | None = None) -> Any:
    """A ``lightning.Callback``."""
    from lightning import Callback

    client = worker or WorkerClient()

    class PhalanxCallback(Callback):
        """Reports each optimizer step; the loss is what the module logs as ``loss``."""

        def __init__(self) -> None:
            self._step = -1

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step == self._step:
                return  # gradients are still accumulated
            self._step = trainer.global_step
            logged = trainer.callback_metrics
            found = (logged[name] for name in ("loss", "train_loss") if name in logged)
            client.stepped(self._step, loss=next((float(value) for value in found), None))
            if client.stopping:
                trainer.should_stop = True

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            client.busy("a validation")

        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
            client.busy("a checkpoint")

    return PhalanxCallback()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
