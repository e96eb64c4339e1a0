"""Traced steps, chosen ones for a person."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from phalanx.config import Log
from phalanx.train.callback import TRACING, Callback, TrainingRun
from phalanx.train.measure.exposure import Communication, activity_of, communication
from phalanx.train.measure.timing import StepTimer
from phalanx.train.report.run_folder import RunFolder

if TYPE_CHECKING:
    from phalanx.train.trainer import StepOutcome

# Else each trace is announced in the rank's log; read when the first one begins.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


class ProfileAsk:
    """Somebody wants the next steps traced; asked from any thread."""

    def __init__(self) -> None:
        self._steps = 0

    def ask(self, steps: int) -> None:
        """Trace so many steps from the next one on."""
        self._steps = steps

    def take(self) -> int:
        """How many are wanted; 0: none. They are not wanted twice."""
        steps, self._steps = self._steps, 0
        return steps


def asked_path(run_folder: RunFolder, first_step: int, rank: int) -> Path:
    """Where a trace that somebody asked for goes."""
    return run_folder.logs / f"trace-step-{first_step}-rank-{rank}.json"


class StepProfiler(Callback):
    """Decides which steps are traced, and reads the traces.

    ``log.profile_steps = [first, last)`` becomes ``logs/trace-rank-N.json``.
    """

    def __init__(
        self,
        settings: Log,
        run_folder: RunFolder,
        timer: StepTimer,
        ask: ProfileAsk | None = None,
    ) -> None:
        self._ask, self._run_folder = ask, run_folder
        if settings.profile_steps:
            self.claims = frozenset({TRACING})
        self._steps = range(*settings.profile_steps) if settings.profile_steps else range(0)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._path = run_folder.logs / f"trace-rank-{self._rank}.json"
        self._profile: profile | None = None  # of the steps that are asked for
        self._timer = timer

    def before_step(self, run: TrainingRun) -> None:
        self.start(run.step + 1)

    def after_step(self, run: TrainingRun, outcome: StepOutcome) -> None:
        self.stop(run.step)

    def end(self, run: TrainingRun, error: BaseException | None) -> None:
        self.close()

    def start(self, step: int) -> None:
        """Trace this step from here on if it is asked for."""
        wanted = self._ask.take() if self._ask is not None and self._profile is None else 0
        if wanted:
            self._steps = range(step, step + wanted)
            self._path = asked_path(self._run_folder, step, self._rank)
        if step in self._steps and self._profile is None:
            self._profile = self._started([ProfilerActivity.CPU, *_device_activity()])

    def stop(self, step: int) -> None:
        """The step is made: the last of the steps asked for is written."""
        if self._profile is not None and step >= self._steps[-1]:
            self._finish(self._profile)

    def close(self) -> None:
        """The run may end before the last traced step: what there is, is kept."""
        if self._profile is not None:
            self._finish(self._profile)

    def _started(self, activities: list[ProfilerActivity]) -> profile:
        tracer = profile(activities=activities)
        _wait_for_device()
        with self._timer.phase("tracing"):
            tracer.start()
        return tracer

    def _stopped(self, tracer: profile, steps: int) -> Communication | None:
        """What the trace says, at the cost of no step's time."""
        _wait_for_device()
        with self._timer.phase("tracing"):
            tracer.stop()
            results = tracer.profiler.kineto_results if tracer.profiler is not None else None
            activity = activity_of(results.events()) if results is not None else None
        return communication(activity, steps) if activity is not None else None

    def _finish(self, tracer: profile) -> None:
        self._profile = None
        trace = self._stopped(tracer, len(self._steps))
        with self._timer.phase("tracing"):
            draft = self._path.with_suffix(".tmp")
            tracer.export_chrome_trace(str(draft))
            draft.rename(self._path)  # who waits for it finds it whole
            if trace is not None:
                summary = self._path.with_suffix(".communication.json")
                summary.write_bytes(msgspec.json.encode(trace) + b"\n")


def _device_activity() -> list[ProfilerActivity]:
    return [ProfilerActivity.CUDA] if torch.cuda.is_available() else []


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
