"""One trial: the job's own ranks make a few steps with other settings, and end."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from msgspec import Struct, structs

from phalanx.config import Checkpoint, Evaluate, Job, resolve
from phalanx.data.feed import steps_read_ahead
from phalanx.plan.tune.trials import TrialFailure
from phalanx.train.exits import ExitCode
from phalanx.train.rank.gang import ForkedRanks
from phalanx.train.rank.launch import start_ranks
from phalanx.train.rank.threads import require_single_thread
from phalanx.train.report import run_folder
from phalanx.train.report.records import Record, StepRecord
from phalanx.train.report.run_folder import RunFolder

WARM_STEPS = 2  # compile, allocate, connect
LEAST_STEPS, MOST_STEPS = 3, 24  # measured
READ_EVERY = 2  # steps between reads of the device, at most
MEMORY = (ExitCode.GPU_MEMORY, ExitCode.HOST_MEMORY)


class TrialLimits(Struct, frozen=True, kw_only=True):
    """How long a trial goes on."""

    measure_seconds: float  # of steps, once warm
    most_seconds: float  # of the trial as a whole
    hopeless_seconds: float = float("inf")  # a step that takes longer says enough


class TrialResult(Struct, frozen=True, kw_only=True):
    """What a trial came to."""

    step_seconds: tuple[float, ...] = ()
    failure: TrialFailure = TrialFailure.NONE
    reason: str = ""
    took_seconds: float
    folder: str


class Interrupted(Exception):  # noqa: N818 - somebody's wish, no error
    """Somebody asked the search to stop."""


def run_trial(job: Job, ranks: int, folder: Path, limits: TrialLimits) -> TrialResult:
    """Start the ranks of a job, as ``phalanx train`` does, and end them when enough is known."""
    require_single_thread()
    began = time.monotonic()
    job = resolve(trial_job(job, folder), ranks)
    trial_folder = run_folder.create(job)
    gang = _TrialRanks(trial_folder, limits, WARM_STEPS + steps_read_ahead(job.data))
    reports = start_ranks(job, ranks, trial_folder, gang)
    with _alarm(limits.most_seconds, gang.out_of_time):
        gang.watch(reports, gang.take)
    if gang.interrupted:
        raise Interrupted
    failure, reason = gang.failed()
    return TrialResult(
        step_seconds=() if failure else tuple(gang.measured),
        failure=failure,
        reason=reason,
        took_seconds=time.monotonic() - began,
        folder=str(trial_folder.path),
    )


def trial_job(job: Job, folder: Path) -> Job:
    """The job without all that is no part of a step: nothing is saved, validated or sent away."""
    warm = WARM_STEPS + steps_read_ahead(job.data)
    steps = max(job.train.steps, warm + MOST_STEPS + 1)
    return structs.replace(
        job,
        name="trials",
        runs=str(folder),
        train=structs.replace(
            job.train, steps=steps, batch_ramp=(), sequence_stages=(), validate_every=0
        ),
        checkpoint=Checkpoint(interval="off", every=0, at_end=False, mode="sync"),
        evaluate=Evaluate(),
        log=structs.replace(
            job.log,
            every=min(job.log.every, READ_EVERY),
            tensorboard=False,
            wandb=False,
            mlflow=False,
            artifacts=(),
            profile_steps=None,
        ),
    )


class _TrialRanks(ForkedRanks):
    """Ranks that are killed as soon as enough is known of them: there is nothing to save."""

    def __init__(self, folder: RunFolder, limits: TrialLimits, warm: int) -> None:
        super().__init__(folder)
        self._limits = limits
        self._warm = warm
        self.measured: list[float] = []
        self.interrupted = self._late = self._enough = False

    def take(self, record: Record) -> None:
        """A record of rank 0."""
        if not isinstance(record, StepRecord) or record.step <= self._warm or self._enough:
            return
        self.measured.append(record.step_seconds)
        count, limits = len(self.measured), self._limits
        hopeless = statistics.median(self.measured) > limits.hopeless_seconds
        long_enough = count >= LEAST_STEPS and sum(self.measured) >= limits.measure_seconds
        if hopeless or long_enough or count >= MOST_STEPS:
            self._enough = True
            self._send(signal.SIGKILL)

    def out_of_time(self, number: int, frame: FrameType | None) -> None:
        """The trial may take no longer."""
        self._late = True
        self._send(signal.SIGKILL)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        self._send(signal.SIGKILL)

    def failed(self) -> tuple[TrialFailure, str]:
        """Why too little was measured, if so."""
        if self._enough or (self._late and self.measured):
            return TrialFailure.NONE, ""
        if self._late:
            return TrialFailure.OTHER, f"no step measured within {self._limits.most_seconds:.0f} s"
        info = self.verdict()
        if info.code == ExitCode.DONE:
            return TrialFailure.OTHER, "it ended before enough steps were measured"
        return (TrialFailure.MEMORY if info.code in MEMORY else TrialFailure.OTHER), info.message


@contextmanager
def _alarm(seconds: float, ring: Any) -> Iterator[None]:
    """Have ``ring`` called after some time, once."""
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
