"""An attempt of a task: what is started, and what became of it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from msgspec import Struct

from phalanx.pipelines.graph import Task
from phalanx.pipelines.run.commands import StepCommand


class TaskOrder(Struct, frozen=True, kw_only=True):
    """All that is needed to start a task's process."""

    task: Task
    name: str  # of this attempt among all that ever were
    command: StepCommand
    work: Path
    log: Path


class Attempt(Protocol):
    """Something that was started."""

    def poll(self) -> str | None:
        """None: it runs; "": it has ended well; otherwise what went wrong."""

    def stop(self) -> None:
        """Ask it to end."""

    def leave(self) -> None:
        """The driver ends: what must not go on without it is ended now."""


class EndedAttempt:
    """Something that was done at once."""

    def __init__(self, problem: str = "") -> None:
        self._problem = problem

    def poll(self) -> str | None:
        return self._problem

    def stop(self) -> None:
        """It has ended."""

    def leave(self) -> None:
        """It has ended."""


class Executor(Protocol):
    """Where processes of tasks run."""

    def adopt(self, name: str, since: float, work: Path) -> Attempt | None:
        """An attempt of this name that goes on without us, or has ended since a time.

        None: there is none, and nothing uses its work folder any more.
        """

    def start(self, order: TaskOrder) -> Attempt:
        """Start one."""
