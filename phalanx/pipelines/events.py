"""What happens to a run (events, which are recorded) and what is to be done (actions)."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from msgspec import Struct


class Output(Struct, frozen=True):
    """What a task made."""

    path: str  # in the pipeline's folder
    content: str  # its hash


class TaskResult(Struct, frozen=True, omit_defaults=True):
    """What is known of a task that is done."""

    outputs: dict[str, Output] = {}
    scores: dict[str, float] = {}


class TaskState(StrEnum):
    """Where a task is."""

    WAITING = "waiting"  # for others
    LOOKING = "looking"  # whether it was done before
    READY = "ready"  # for its turn
    RETRYING = "retrying"  # after a pause
    RUNNING = "running"
    ASKING = "asking"  # a person
    DONE = "done"
    CACHED = "cached"  # done by an earlier run
    FAILED = "failed"
    BLOCKED = "blocked"  # by another that failed
    SKIPPED = "skipped"  # its condition does not hold
    CANCELLED = "cancelled"


GOOD = frozenset({TaskState.DONE, TaskState.CACHED})
BAD = frozenset({TaskState.FAILED, TaskState.BLOCKED, TaskState.CANCELLED})
ENDED = GOOD | BAD | {TaskState.SKIPPED}


class PipelineEvent(Struct, frozen=True, tag=True, omit_defaults=True):
    """Something that happened, at a time in seconds."""

    time: float


class RunBegan(PipelineEvent, frozen=True, tag=True):
    """A person started a run."""

    pipeline: dict[str, Any]  # the table of the file
    inputs: dict[str, str]  # hashes of raw files by pattern, and of job files
    version: str  # of Phalanx
    parallel: int  # tasks that may run at a time


class RunInterrupted(PipelineEvent, frozen=True, tag=True):
    """What drove the run ended in the middle; another one goes on."""

    parallel: int


class LookedUp(PipelineEvent, frozen=True, tag=True):
    """Whether a task was done before with the same inputs."""

    task: str
    result: TaskResult | None = None


class ReleaseRead(PipelineEvent, frozen=True, tag=True):
    """Scores of the last release of a model, for a task's conditions; none: there is no release."""

    task: str
    version: int = 0
    scores: dict[str, float] = {}


class TaskFinished(PipelineEvent, frozen=True, tag=True):
    """An attempt has made all outputs."""

    task: str
    result: TaskResult


class TaskFailed(PipelineEvent, frozen=True, tag=True):
    """An attempt has failed."""

    task: str
    reason: str


class TaskAnswered(PipelineEvent, frozen=True, tag=True):
    """A person decided."""

    task: str
    approved: bool
    who: str = ""


class RunCancelled(PipelineEvent, frozen=True, tag=True):
    """A person ended the run."""

    who: str = ""


class TimePassed(PipelineEvent, frozen=True, tag=True):
    """A pause, a time limit or the budget is over."""


AnyEvent = (
    RunBegan
    | RunInterrupted
    | LookedUp
    | ReleaseRead
    | TaskFinished
    | TaskFailed
    | TaskAnswered
    | RunCancelled
    | TimePassed
)


class LookUp(Struct, frozen=True):
    """Say whether this key has a result."""

    task: str
    key: str


class ReadRelease(Struct, frozen=True):
    """Say what the last release of a model scored."""

    task: str
    model: str


class StartTask(Struct, frozen=True):
    """Begin an attempt."""

    task: str
    key: str
    attempt: int


class StopTask(Struct, frozen=True):
    """End an attempt, which then has failed."""

    task: str


class KeepResult(Struct, frozen=True):
    """Keep it that a task without outputs is done."""

    task: str
    key: str


Action = LookUp | ReadRelease | StartTask | StopTask | KeepResult
