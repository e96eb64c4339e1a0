"""Events of a run, which are recorded, and actions, which its driver carries out."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from msgspec import Struct


class Output(Struct, frozen=True):
    """An output of a task."""

    path: str  # in the pipeline's folder
    content: str  # its hash


class TaskResult(Struct, frozen=True, omit_defaults=True):
    """The result of a completed task."""

    outputs: dict[str, Output] = {}
    scores: dict[str, float] = {}


class TaskState(StrEnum):
    """The state of a task."""

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
    """Something that happened, and when."""

    time_ns: int


class RunBegan(PipelineEvent, frozen=True, tag=True):
    """A person started a run."""

    pipeline: dict[str, Any]  # the table of the file
    inputs: dict[str, str]  # hashes of raw files by pattern, and of job files
    version: str  # of Phalanx
    parallel: int  # tasks that may run at a time
    queued: bool = False  # attempts wait in a queue first: their time begins when that is said


class RunInterrupted(PipelineEvent, frozen=True, tag=True):
    """The driver of the run was lost; another one continues."""

    parallel: int


class LookedUp(PipelineEvent, frozen=True, tag=True):
    """The stored result of a task with the same key, if there is one."""

    task: str
    result: TaskResult | None = None


class ReleaseRead(PipelineEvent, frozen=True, tag=True):
    """Scores of the last release of a model, for a task's conditions; none: there is no release."""

    task: str
    version: int = 0
    scores: dict[str, float] = {}


class AttemptBegan(PipelineEvent, frozen=True, tag=True):
    """An attempt has started after waiting in a queue."""

    task: str


class TaskFinished(PipelineEvent, frozen=True, tag=True):
    """An attempt has made all outputs."""

    task: str
    result: TaskResult


class TaskFailed(PipelineEvent, frozen=True, tag=True):
    """An attempt has failed."""

    task: str
    reason: str


def _by_whom(verb: str, who: str, why: str) -> str:
    return f"{verb} by {who or 'somebody'}" + (f": {why}" if why else "")


class TaskAnswered(PipelineEvent, frozen=True, tag=True):
    """A person answered a task's question."""

    task: str
    approved: bool
    who: str = ""
    why: str = ""  # in that person's words

    def by_whom(self, verb: str) -> str:
        """What was decided, by whom and why."""
        return _by_whom(verb, self.who, self.why)


class RunCancelled(PipelineEvent, frozen=True, tag=True):
    """A person cancelled the run."""

    who: str = ""
    why: str = ""  # in that person's words

    def by_whom(self, verb: str) -> str:
        """What was decided, by whom and why."""
        return _by_whom(verb, self.who, self.why)


class TimePassed(PipelineEvent, frozen=True, tag=True):
    """A pause, a time limit or the budget is over."""


AnyEvent = (
    RunBegan
    | RunInterrupted
    | LookedUp
    | ReleaseRead
    | AttemptBegan
    | TaskFinished
    | TaskFailed
    | TaskAnswered
    | RunCancelled
    | TimePassed
)


class LookUp(Struct, frozen=True):
    """Look up the stored result of a key."""

    task: str
    key: str


class ReadRelease(Struct, frozen=True):
    """Read the scores of a model's current release."""

    task: str
    model: str


class StartTask(Struct, frozen=True):
    """Start an attempt."""

    task: str
    key: str
    attempt: int


class StopTask(Struct, frozen=True):
    """Stop an attempt, which then counts as failed."""

    task: str


class KeepResult(Struct, frozen=True):
    """Store that a task without outputs is complete."""

    task: str
    key: str


Action = LookUp | ReadRelease | StartTask | StopTask | KeepResult
