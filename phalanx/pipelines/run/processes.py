"""Processes of steps on this machine: they end with the driver; leftovers are found and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from phalanx.control.host.parent_death import follow
from phalanx.pipelines.run.attempts import Attempt, EndedAttempt, ProcessOrder, last_words

MARK = "PHALANX_PIPELINE_WORK"  # a variable that all processes of a step have
GRACE_SECONDS = 10.0  # between asking and killing


class StepProcess:
    """One attempt of a step as a process group."""

    def __init__(self, order: ProcessOrder) -> None:
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
        """None while it runs, "" after success, otherwise the error."""
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
        return f"{how}{last_words(self._log)}"

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after a grace period."""
        self._stop_by = time.monotonic() + GRACE_SECONDS
        self._signal(signal.SIGTERM)

    def leave(self) -> None:
        """Kill it at once, together with its driver."""
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
    """Starts steps as processes on this machine."""

    def end_leftovers(self, work: Path) -> None:
        """Kill what outlived its driver."""
        end_leftovers(work)

    def start(self, order: ProcessOrder) -> Attempt:
        """Start an attempt; one that cannot be started has failed."""
        try:
            return StepProcess(order)
        except OSError as error:
            return EndedAttempt(f"{order.command.argv[0]} cannot be started: {error.strerror}")


def end_leftovers(work: Path) -> int:
    """Kill processes of an earlier attempt in a work folder, and return their number."""
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
