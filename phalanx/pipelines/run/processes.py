"""Processes of steps on this machine: they end with whoever drives the run, and are found again."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from phalanx.control.host.parent_death import follow
from phalanx.pipelines.run.attempts import Attempt, EndedAttempt, TaskOrder

MARK = "PHALANX_PIPELINE_WORK"  # a variable that all processes of a step have
GRACE_SECONDS = 10.0  # between asking and killing
LAST_BYTES = 2000
LAST_LINES = 3


class StepProcess:
    """One attempt of a step as a process group."""

    def __init__(self, order: TaskOrder) -> None:
        self._log, self._stop_by = order.log, 0.0
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                order.command.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **order.command.environment, MARK: str(order.work)},
                start_new_session=True,
                preexec_fn=partial(follow, os.getpid(), signal.SIGKILL),  # we have one thread
            )

    def poll(self) -> str | None:
        """None: it runs; "": it has ended well; otherwise what went wrong."""
        code = self._process.poll()
        if code is None:
            if self._stop_by and time.monotonic() > self._stop_by:
                self._signal(signal.SIGKILL)
            return None
        self._signal(signal.SIGKILL)  # what it left behind
        if self._stop_by:
            return "it was stopped"
        if code == 0:
            return ""
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{how}{_last_words(self._log)}"

    def stop(self) -> None:
        """Ask it to end, and soon make it."""
        self._stop_by = time.monotonic() + GRACE_SECONDS
        self._signal(signal.SIGTERM)

    def leave(self) -> None:
        """End it now: nothing of a run goes on without its driver."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


class LocalExecutor:
    """Starts steps as processes here."""

    def adopt(self, name: str, since: float, work: Path) -> Attempt | None:
        """None: processes end with whoever started them; what did not is ended now."""
        end_leftovers(work)
        return None

    def start(self, order: TaskOrder) -> Attempt:
        """Start one; one that cannot be started has failed."""
        try:
            return StepProcess(order)
        except OSError as error:
            return EndedAttempt(f"{order.command.argv[0]} cannot be started: {error.strerror}")


def _last_words(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LAST_BYTES))
        text = file.read().decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ": " + " | ".join(lines[-LAST_LINES:]) if lines else ""


def end_leftovers(work: Path) -> int:
    """Kill processes of an earlier attempt that still use a work folder; how many there were."""
    found = set(_marked(work))
    for pid in found:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    while set(_marked(work)) & found:
        time.sleep(0.01)
    return len(found)


def _marked(work: Path) -> list[int]:
    wanted = f"{MARK}={work}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError, ValueError):
            if wanted in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found
