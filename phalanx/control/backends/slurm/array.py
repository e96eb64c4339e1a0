"""Work units on Slurm: one array for a phase, each of whose tasks does a share of the units."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from phalanx.control.backends.slurm.programs import SlurmCommands, SlurmError
from phalanx.data.prepare.recipe import SlurmSettings

TASKS = 32  # of an array, where nobody says how many
POLL_SECONDS = 1.0
UNANSWERED_SECONDS = 10.0  # until the next try where Slurm does not answer
MOST_UNANSWERED = 90  # tries in a row: a controller that is restarted is back before


class SlurmArray:
    """Has units done by array tasks; work and inputs lie on a file system that nodes share."""

    def __init__(
        self,
        settings: SlurmSettings,
        tasks: int = 0,
        programs: SlurmCommands | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._settings, self._tasks = settings, tasks or TASKS
        self._programs, self._sleep = programs or SlurmCommands(), sleep

    def run(self, phase: Path, units: int, done: Callable[[], None]) -> None:
        """Submit an array and wait until none of its tasks is left; it ends with us."""
        tasks = min(self._tasks, units)
        said = self._programs.run("sbatch", *self.options(phase, tasks), text=script(phase, tasks))
        number = said.strip().partition(";")[0]
        try:
            self._wait(number)
        except BaseException:
            with suppress(SlurmError):
                self._programs.run("scancel", number)
            raise

    def _wait(self, number: str) -> None:
        unanswered, left = 0, True
        while left:
            try:
                left, unanswered = self._left(number), 0
            except SlurmError:
                unanswered += 1
                if unanswered > MOST_UNANSWERED:
                    raise
            if left:
                self._sleep(UNANSWERED_SECONDS if unanswered else POLL_SECONDS)

    def options(self, phase: Path, tasks: int) -> list[str]:
        """What sbatch is told."""
        settings = self._settings
        output = phase.with_suffix("") / "%A_%a.out"
        output.parent.mkdir(exist_ok=True)
        named = {
            "partition": settings.partition,
            "account": settings.account,
            "time": settings.time,
        }
        return [
            *("--parsable", f"--array=0-{tasks - 1}", f"--job-name=prepare-{phase.stem}"),
            *("--ntasks=1", "--cpus-per-task=1", "--requeue", f"--output={output}"),
            *(f"--{name}={value}" for name, value in named.items() if value),
            *settings.options,
        ]

    def _left(self, number: str) -> bool:
        """Whether any task waits or runs; Slurm forgets jobs that have ended."""
        try:
            shown = self._programs.run("squeue", "--noheader", "--format=%i", f"--jobs={number}")
        except SlurmError as error:
            if "Invalid job id" in str(error):
                return False
            raise
        return bool(shown.strip())


def script(phase: Path, tasks: int) -> str:
    """What each task of the array runs."""
    command = [sys.executable, "-m", "phalanx", "data", "prepare", "--unit"]
    share = f'{shlex.quote(str(phase))}:"$SLURM_ARRAY_TASK_ID"/{tasks}'
    return f"#!/bin/sh\nexec {shlex.join(command)} {share}\n"
