"""Runs for tests: a launcher forked from this process, on a model of a few thousand weights."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import Job, job_from_table, resolve
from phalanx.train.callback import Callback
from phalanx.train.exits import ExitInfo
from phalanx.train.rank import launch as launching
from phalanx.train.report.records import CheckpointRecord, StepRecord, read_records
from phalanx.train.report.run_folder import RunFolder, create

TINY: dict[str, Any] = {
    "name": "try",
    "model": {"dim": 16, "layers": 2, "heads": 2, "ffn": 32, "vocab": 64},
    "data": {"sequence": 16},
    "parallel": {"zero": 0},  # sharding makes a step on CPUs take three times as long
    "precision": {"compute": "float32"},
    "train": {"steps": 6, "global_batch": 4, "device": "cpu", "collective_timeout_seconds": 60.0},
    "log": {"every": 2},
}


def small_job(runs: Path, world_size: int = 2, **overrides: object) -> Job:
    """A job of a few seconds; overrides are dotted keys with ``__`` for the dot."""
    settings = [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()]
    return resolve(job_from_table({**TINY, "runs": str(runs)}, settings), world_size)


class Run:
    """A launcher that runs in a forked process."""

    def __init__(
        self,
        job: Job,
        world_size: int = 2,
        json: bool = False,
        before: Callable[[], None] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.folder: RunFolder = create(job)
        self.output = self.folder.path / "launcher.txt"
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                self._redirect()
                if before is not None:
                    before()
                code = launching.launch(
                    job, world_size, self.folder, json=json, callbacks=callbacks
                )
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)

    def _redirect(self) -> None:
        output = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)

    @property
    def text(self) -> str:
        return self.output.read_text()

    @property
    def steps(self) -> list[StepRecord]:
        if not self.folder.steps.exists():
            return []
        return list(read_records(self.folder.steps, StepRecord))

    @property
    def checkpoints(self) -> list[CheckpointRecord]:
        return list(read_records(self.folder.metrics / "checkpoints.jsonl", CheckpointRecord))

    @property
    def exit(self) -> ExitInfo:
        info = self.folder.read_exit()
        assert info is not None, self.text
        return info

    def wait(self, seconds: float = 110.0) -> int:
        """The launcher's exit code."""
        self.until(self._ended, seconds)
        assert self.code is not None
        return self.code

    def until(self, happened: Callable[[], bool], seconds: float = 110.0) -> None:
        """Wait for something the run does."""
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline, f"waited {seconds} s in vain:\n{self.text}"
            time.sleep(0.02)

    def until_step(self, step: int) -> None:
        """Wait until the record of a step is written."""
        self.until(lambda: bool(self.steps) and self.steps[-1].step >= step)

    def rank_pids(self) -> list[int]:
        """Processes of the ranks, by rank."""
        return children(self.pid)

    def kill(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def _ended(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def end(self) -> None:
        """Leave no process behind, whatever the test found; the ranks die with the launcher."""
        if not self._ended():
            self.kill(signal.SIGKILL)
            self.until(self._ended)


def children(pid: int) -> list[int]:
    """Processes started by a process, oldest first."""
    # In the kernel's order, which is that of their birth; their numbers may have begun anew.
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Callable[..., Run]:
    """Starts runs that are ended with the test."""

    def begin(*args: Any, **kwargs: Any) -> Run:
        run = Run(*args, **kwargs)
        request.addfinalizer(run.end)
        return run

    return begin
