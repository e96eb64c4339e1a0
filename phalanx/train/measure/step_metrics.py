"""Records of steps, validations and checkpoints, handed to the run's sinks as they are made."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from phalanx.checkpoint import CheckpointError
from phalanx.data import DataExhausted
from phalanx.train.callback import STEP_TIMES, Callback, TrainingRun
from phalanx.train.measure.meter import Meter
from phalanx.train.report.records import CheckpointRecord, ValidationRecord

if TYPE_CHECKING:
    from phalanx.train.trainer import StepOutcome, Trainer

IS_VALIDATING = "a validation is under way"


class StepMetrics(Callback):
    """Measures each step; its record goes to the sinks at the log interval."""

    claims = frozenset({STEP_TIMES})

    def __init__(self, trainer: Trainer) -> None:
        self.meter = Meter(trainer.job, trainer.device, trainer.timer, trainer.generation)

    def after_step(self, run: TrainingRun, outcome: StepOutcome) -> None:
        """The step ends here: what other callbacks did after it is part of its time."""
        self.meter.add(run.step, run.trainer.tokens, outcome, run.snapshot_every)
        if run.is_last(outcome) or self._is_due(run):
            self._report(run)

    def save(self, run: TrainingRun, record: CheckpointRecord) -> None:
        run.sinks.write([record])

    def end(self, run: TrainingRun, error: BaseException | None) -> None:
        run.time_text = self.meter.waiting_text()
        run.details |= {name: count for name, count in self.meter.oddities.items() if count}
        if isinstance(error, CheckpointError | DataExhausted):
            self._report(run)
        elif isinstance(error, Exception) and run.trainer.device.type == "cpu":
            # A peer was lost: the steps before that count. A broken device cannot be asked.
            run.sinks.write(self.meter.records())

    def _is_due(self, run: TrainingRun) -> bool:
        """At the interval, and at the first step, which a person is waiting for."""
        return run.step == run.first_step or run.step % run.job.log.every == 0

    def _report(self, run: TrainingRun) -> None:
        with run.trainer.timer.phase("device"):
            records = self.meter.records()
        with run.trainer.timer.phase("report"):
            run.sinks.write(records)
        self.meter.check_finite(records)


class Validation(Callback):
    """The loss on held-out samples, every ``train.validate_every`` steps; no part of a step."""

    def begin(self, run: TrainingRun) -> None:
        """Nobody finds out after hours of training that there is nothing to validate on."""
        if run.job.train.validate_every:
            run.trainer.stages.refuse_without_validation()

    def after_step(self, run: TrainingRun, outcome: StepOutcome) -> None:
        every = run.job.train.validate_every
        if every == 0 or run.step % every:
            return
        run.orders.busy(IS_VALIDATING, run.step)
        began = time.perf_counter()
        run.checkpointer.before_update()  # an average may take the place of what is copied
        loss = run.trainer.validate()
        record = ValidationRecord(
            job=run.job.name,
            generation=run.trainer.generation,
            step=run.step,
            loss=loss if math.isfinite(loss) else None,
            seconds=time.perf_counter() - began,
        )
        run.sinks.write([record])
        if run.job.checkpoint.keep_best or run.job.checkpoint.archive.keep_best:
            run.checkpointer.add_score(run.step, loss)
        run.trainer.timer.restart()
