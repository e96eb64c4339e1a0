"""Numbers of one's own beside those that every run reports."""

from __future__ import annotations

import math

import msgspec

from phalanx.train.callback import Callback, TrainingRun
from phalanx.train.report.event_file import EventFile
from phalanx.train.trainer import StepOutcome

FILE = "own.jsonl"  # in the metrics of a run


class Metric(Callback):
    """Derive from it and name the class in ``code.callbacks``.

    What ``measure`` returns goes to ``metrics/own.jsonl`` and to TensorBoard.
    """

    every = 10  # steps between two measurements

    def __init__(self) -> None:
        self._events: EventFile | None = None

    def measure(self, run: TrainingRun, outcome: StepOutcome) -> dict[str, float]:
        """Values by name after a step; called on every rank, and those of rank 0 are written."""
        raise NotImplementedError

    def after_step(self, run: TrainingRun, outcome: StepOutcome) -> None:
        if run.step % self.every:
            return
        values = {name: float(value) for name, value in self.measure(run, outcome).items()}
        if run.rank:
            return
        known = {name: value for name, value in values.items() if math.isfinite(value)}
        line = {"step": run.step, **{name: known.get(name) for name in values}}
        with (run.folder.metrics / FILE).open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
        if run.job.log.tensorboard:
            self._tensorboard(run).scalars(run.step, known)

    def end(self, run: TrainingRun, error: BaseException | None) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None

    def _tensorboard(self, run: TrainingRun) -> EventFile:
        if self._events is None:
            folder = run.folder.metrics / "tensorboard" / self.name
            folder.mkdir(parents=True, exist_ok=True)
            self._events = EventFile(folder)
        return self._events
