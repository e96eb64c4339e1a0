"""Who does the units of a phase: processes of this machine, or whatever else takes commands."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Protocol

from phalanx.data.errors import DataError
from phalanx.data.prepare.units import run_task, run_unit
from phalanx.data.prepare.work import UnitPhase, WorkFolder
from phalanx.data.worker_process import follow_parent

ATTEMPTS = 4  # at the units of a phase, where workers die

Progress = Callable[[str, int, int], None]  # phase, units done, units


class UnitEngine(Protocol):
    """Has units done."""

    def run(self, phase: Path, units: int, done: Callable[[], None]) -> None:
        """Do the units of a phase's file that are not done; returns when nothing runs any more.

        Units of workers that died are missing then. ``done`` may be called as units end.
        """


class LocalEngine:
    """Processes of this machine; with one worker, this process itself."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        # Kept from phase to phase; its processes end when nobody refers to it any more.
        self._pool: ProcessPoolExecutor | None = None

    def run(self, phase: Path, units: int, done: Callable[[], None]) -> None:
        """Do the units, each on the next free process."""
        work, described = WorkFolder.of_phase(phase)
        missing = [at for at, unit in enumerate(described.units) if not work.done(unit)]
        if min(self.workers, len(missing)) <= 1:
            for number in missing:
                run_unit(work, described, described.units[number])
                done()
            return
        if self._pool is None:
            # Spawned, not forked: threads may be alive here, which fork would leave in pieces.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.workers, context, follow_parent)
        try:
            ends = [self._pool.submit(run_task, phase, number, units) for number in missing]
            for end in as_completed(ends):
                end.result()
                done()
        except BrokenProcessPool:  # a worker was killed: what it did is missing
            self._pool = None


def run_phase(engine: UnitEngine, work: WorkFolder, phase: UnitPhase, progress: Progress) -> None:
    """Have all units of a phase done; ``DataError`` where one cannot be."""
    total = len(phase.units)
    path = work.write_phase(phase)
    for _ in range(ATTEMPTS):
        left = [unit for unit in phase.units if not work.done(unit)]
        done = total - len(left)
        progress(phase.name, done, total)
        if not left:
            return

        def count() -> None:
            nonlocal done
            done += 1
            progress(phase.name, min(done, total), total)

        engine.run(path, total, count)
        for unit in left:
            if (failure := work.failure(unit)) is not None:
                raise DataError(failure.key, failure.value, failure.rule, failure.fix)
    if left := [unit for unit in phase.units if not work.done(unit)]:
        rule = f"{len(left)} of {total} units of the phase {phase.name} ended without a result"
        fix = "look at the workers' output; finished units are kept (out of memory?)"
        raise DataError("work", work.path, rule, fix)
