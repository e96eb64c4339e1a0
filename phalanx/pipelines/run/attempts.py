"""An attempt at a task: what to start, and the interface of what was started."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from phalanx.pipelines.run.commands import StepCommand

LAST_BYTES = 2000
LAST_LINES = 3
MOST_NAME = 50  # characters of a task's name in that of a file


class ProcessOrder(Struct, frozen=True, kw_only=True):
    """Everything needed to start a step's process."""

    command: StepCommand
    work: Path
    log: Path
    gpus: int = 0


def log_name(task: str, attempt: int) -> str:
    """The file of an attempt's log; a name that no file can have is cut, and told apart."""
    name = task.replace("/", "_")
    if name != task or len(name) > MOST_NAME:
        name = f"{name[:MOST_NAME]}-{hashlib.sha256(task.encode()).hexdigest()[:8]}"
    return f"{name}.{attempt}.log"


def last_words(log: Path) -> str:
    """The last lines of a log, to append to an error; "" if there are none."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LAST_BYTES))
        text = file.read().decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ": " + " | ".join(lines[-LAST_LINES:]) if lines else ""


class Attempt(Protocol):
    """A started attempt."""

    def poll(self) -> str | None:
        """None while it runs, "" after success, otherwise the error."""

    def stop(self) -> None:
        """Ask it to end."""

    def leave(self) -> None:
        """The driver ends: kill whatever must not outlive it."""


class EndedAttempt:
    """An attempt that ended as soon as it was started."""

    def __init__(self, problem: str = "") -> None:
        self._problem = problem

    def poll(self) -> str | None:
        return self._problem

    def stop(self) -> None:
        """Nothing to do: it has ended."""

    def leave(self) -> None:
        """Nothing to do: it has ended."""


class Executor(Protocol):
    """Starts the processes of steps somewhere."""

    def end_leftovers(self, work: Path) -> None:
        """Kill what an earlier attempt left running in a work folder."""

    def start(self, order: ProcessOrder) -> Attempt:
        """Start an attempt."""
