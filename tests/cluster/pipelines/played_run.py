"""A run in a played world: results in a dictionary, attempts that end when they are told to."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import Any

from phalanx.cluster.pipelines.description import pipeline_from_table
from phalanx.cluster.pipelines.events import (
    GOOD,
    AnyEvent,
    KeepResult,
    LookedUp,
    LookUp,
    Output,
    ReadRelease,
    ReleaseRead,
    RunBegan,
    RunInterrupted,
    StartTask,
    StopTask,
    TaskAnswered,
    TaskFailed,
    TaskFinished,
    TaskResult,
    TaskState,
    TimePassed,
)
from phalanx.cluster.pipelines.machine import PipelineMachine
from phalanx.cluster.pipelines.rules import check_pipeline
from phalanx.cluster.units import SECOND_NS


class PlayedRun:
    """Drives the machine, checks its promises at every action, and may lose it at any time."""

    def __init__(
        self,
        steps: dict[str, Any],
        *,
        scores: dict[str, dict[str, float]] | None = None,
        released: dict[str, float] | None = None,
        store: dict[str, TaskResult] | None = None,
        inputs: dict[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self.table = {"name": "played", "steps": steps, **settings}
        self.scores, self.released = scores or {}, released or {}
        self.store: dict[str, TaskResult] = {} if store is None else store
        self.time_ns = 1000 * SECOND_NS
        self.events: list[AnyEvent] = []
        self.running: dict[str, str] = {}  # keys by task
        self.started: list[str] = []
        self.stopped: list[str] = []
        self._inputs = inputs or {}
        self.machine = self._new_machine()
        self.parallel = self.machine.pipeline.parallel

    def _new_machine(self) -> PipelineMachine:
        pipeline = pipeline_from_table(self.table)
        return PipelineMachine(pipeline, check_pipeline(pipeline, lambda pattern: True))

    def begin(self) -> PlayedRun:
        hashes = {
            pattern: self._inputs.get(pattern, pattern)
            for step in self.table["steps"].values()
            for pattern in (*step.get("inputs", {}).values(), step.get("job", ""))
        }
        self.feed(RunBegan(self.time_ns, self.table, hashes, "1", self.parallel))
        return self

    def feed(self, event: AnyEvent) -> None:
        waiting = deque([event])
        while waiting:
            happened = waiting.popleft()
            self.events.append(happened)
            for action in self.machine.handle(happened):
                match action:
                    case LookUp(task=task, key=key):
                        waiting.append(LookedUp(self.time_ns, task, self.store.get(key)))
                    case ReadRelease(task=task):
                        waiting.append(ReleaseRead(self.time_ns, task, 1, self.released))
                    case StartTask(task=task, key=key):
                        self._start(task, key)
                    case StopTask(task=task):
                        self.stopped.append(task)
                    case KeepResult(key=key):
                        self.store[key] = TaskResult()

    def _start(self, task: str, key: str) -> None:
        progress = self.machine.tasks[task]
        assert key not in self.store, f"{task} is done, and is started again"
        assert task not in self.running
        for waits in progress.task.waits:
            if waits.end == "ok":
                assert self.machine.tasks[waits.task].state in GOOD
        self.running[task] = key
        self.started.append(task)
        assert len(self.running) <= self.parallel

    def finish(self, task: str, told: bool = True) -> None:
        """An attempt ends well; not told: the driver is lost before it hears of it."""
        key = self.running.pop(task)
        step = self.machine.tasks[task].task.step
        outputs = {
            name: Output(path, hashlib.sha256(f"{key}{name}".encode()).hexdigest())
            for name, path in step.outputs.items()
        }
        result = TaskResult(outputs, self.scores.get(task, {}))
        self.store[key] = result
        if told:
            self.feed(TaskFinished(self.time_ns, task, result))

    def fail(self, task: str, reason: str = "exit code 1") -> None:
        del self.running[task]
        self.feed(TaskFailed(self.time_ns, task, reason))

    def answer(self, task: str, approved: bool) -> None:
        self.feed(TaskAnswered(self.time_ns, task, approved, "ada"))

    def pass_time(self, seconds: float) -> None:
        self.time_ns += round(seconds * SECOND_NS)
        self.feed(TimePassed(self.time_ns))

    def crash(self) -> None:
        """The driver is lost with all attempts; another one goes on from the record."""
        before = {name: self._facts(name) for name in self.machine.tasks}
        self.running.clear()
        self.machine = self._new_machine()
        for event in self.events:
            self.machine.handle(event)
        assert before == {name: self._facts(name) for name in self.machine.tasks}
        self.feed(RunInterrupted(self.time_ns, self.parallel))

    def _facts(self, name: str) -> tuple[object, ...]:
        each = self.machine.tasks[name]
        return (each.state, each.reason, each.key, each.attempts, each.failures, each.result)

    def states(self) -> dict[str, TaskState]:
        return {name: each.state for name, each in self.machine.tasks.items()}
