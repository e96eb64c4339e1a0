"""Steps as jobs of Slurm, in folders that its nodes and this machine share."""

from __future__ import annotations

import hashlib
import os
import shlex
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from phalanx.cluster.pipelines.description import SlurmSteps
from phalanx.control.backends.slurm.programs import SlurmCommands, SlurmError
from phalanx.pipelines.run.attempts import Attempt, EndedAttempt, ProcessOrder, last_words

LOOK_SECONDS = 2.0  # between two questions to Slurm; a step that has ended says so itself
LATE_SECONDS = 10.0  # that a shared file system may take to show what a node wrote
UNKNOWN = "Invalid job id"  # what Slurm says of jobs that it has forgotten


class SlurmStep:
    """One attempt of a step as a job. It leaves its exit code in a file beside its log."""

    def __init__(
        self, order: ProcessOrder, number: str, programs: SlurmCommands, clock: Callable[[], float]
    ) -> None:
        self._log, self._number, self._programs, self._clock = order.log, number, programs, clock
        self._next_look = clock() + LOOK_SECONDS
        self._gone_at = 0.0
        self._stopped = False

    def poll(self) -> str | None:
        """None while it waits or runs, "" after success, otherwise the error."""
        code = _exit_code(self._log)
        if code is None and not self._is_lost():
            return None
        if self._stopped:
            return "it was stopped"
        if code == 0:
            return ""
        how = f"exit code {code}" if code is not None else f"Slurm job {self._number} was lost"
        return f"{how}{last_words(self._log)}"

    def _is_lost(self) -> bool:
        """Whether the job is gone without an exit code; while Slurm does not answer, it is not."""
        now = self._clock()
        if not self._gone_at and now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            with suppress(SlurmError):
                if not in_queue(self._programs, f"--jobs={self._number}"):
                    self._gone_at = now
        late = 0.0 if self._stopped else LATE_SECONDS
        return bool(self._gone_at) and now >= self._gone_at + late

    def stop(self) -> None:
        """Cancel the Slurm job."""
        self._stopped = True
        self._programs.run("scancel", self._number)

    def leave(self) -> None:
        """End the attempt together with its driver."""
        if self.poll() is None:
            with suppress(SlurmError):
                self._programs.run("scancel", self._number)


class SlurmExecutor:
    """Submits a job for each attempt of a step."""

    def __init__(
        self,
        settings: SlurmSteps,
        programs: SlurmCommands | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._programs = settings, programs or SlurmCommands()
        self._clock = clock

    def end_leftovers(self, work: Path) -> None:
        """Cancel jobs left by a lost driver, and wait until they are gone."""
        named = f"--name={job_name(work)}"
        while numbers := in_queue(self._programs, named):
            self._programs.run("scancel", *numbers)
            time.sleep(LOOK_SECONDS)

    def start(self, order: ProcessOrder) -> Attempt:
        """Submit an attempt; if Slurm refuses it, it has failed with Slurm's message."""
        try:
            said = self._programs.run("sbatch", *self.options(order), text=step_script(order))
        except SlurmError as error:
            return EndedAttempt(str(error))
        number = said.strip().partition(";")[0]
        return SlurmStep(order, number, self._programs, self._clock)

    def options(self, order: ProcessOrder) -> list[str]:
        """Options of sbatch. No requeue: a restarted job would find partial outputs."""
        settings = self._settings
        named = {
            "partition": settings.partition,
            "account": settings.account,
            "time": settings.time,
            "gres": f"gpu:{order.gpus}" if order.gpus else "",
        }
        return [
            *("--parsable", "--no-requeue", "--ntasks=1", f"--job-name={job_name(order.work)}"),
            *(f"--output={order.log}", f"--chdir={Path.cwd()}"),
            *(f"--{name}={value}" for name, value in named.items() if value),
            *settings.options,
        ]


def job_name(work: Path) -> str:
    """The name of jobs that use a work folder."""
    return f"phalanx-step-{hashlib.sha256(os.fsencode(work)).hexdigest()[:16]}"


def step_script(order: ProcessOrder) -> str:
    """A batch script that runs the step's command and writes its exit code atomically."""
    code, draft = (shlex.quote(str(path)) for path in (_code_file(order.log), _draft(order.log)))
    lines = [
        f"export {name}={shlex.quote(text)}" for name, text in order.command.environment.items()
    ]
    lines += [shlex.join(order.command.argv), f"echo $? > {draft}", f"mv {draft} {code}"]
    return "\n".join(["#!/bin/sh", *lines, ""])


def in_queue(programs: SlurmCommands, which: str) -> list[str]:
    """Numbers of jobs that wait or run."""
    try:
        return programs.run("squeue", "--noheader", "--format=%i", which).split()
    except SlurmError as error:
        if UNKNOWN in str(error):
            return []
        raise


def _code_file(log: Path) -> Path:
    return log.with_name(f"{log.name}.exit")


def _draft(log: Path) -> Path:
    return log.with_name(f"{log.name}.exit.draft")


def _exit_code(log: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(_code_file(log).read_text())
    return None
