"""Drives a run: records what happens, lets the machine decide, carries its actions out."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx.control.server.webhooks import post
from phalanx.pipelines.events import (
    ENDED,
    Action,
    AnyEvent,
    KeepResult,
    LookedUp,
    LookUp,
    ReadRelease,
    ReleaseRead,
    RunCancelled,
    StartTask,
    StopTask,
    TaskAnswered,
    TaskFailed,
    TaskFinished,
    TaskState,
    TimePassed,
)
from phalanx.pipelines.graph import Produced, RawFiles, Task
from phalanx.pipelines.machine import PipelineMachine, RunState, TaskProgress
from phalanx.pipelines.registry.models import ModelRegistry, RegistryError
from phalanx.pipelines.run.attempts import Attempt, EndedAttempt, Executor, TaskOrder
from phalanx.pipelines.run.commands import step_command
from phalanx.pipelines.run.content import ContentCache, pattern_paths
from phalanx.pipelines.run.record import PipelineRecord
from phalanx.pipelines.run.registering import register_task
from phalanx.pipelines.run.scores_file import ScoresError
from phalanx.pipelines.run.training import trained
from phalanx.pipelines.run.workspace import UnfinishedOutput, Workspace

SHORTEST_PAUSE, LONGEST_PAUSE = 0.002, 0.1  # seconds between two looks
DONE_HERE = ("register", "notify")  # kinds without a process of their own


class PersonOrder(Struct, frozen=True, omit_defaults=True):
    """What a person wants of a run."""

    who: str
    cancel: bool = False
    task: str = ""
    approved: bool = False


class PipelineDriver:
    """One run, from its last event to its end."""

    def __init__(
        self,
        machine: PipelineMachine,
        workspace: Workspace,
        number: int,
        record: PipelineRecord,
        executor: Executor,
        changed: Callable[[TaskProgress], None] = lambda progress: None,
    ) -> None:
        self.machine, self._workspace, self._number = machine, workspace, number
        self._record, self._executor, self._changed = record, executor, changed
        self._hashes = ContentCache(workspace.hashes)
        self._registry = ModelRegistry(Path(machine.pipeline.registry))
        self._attempts: dict[str, Attempt] = {}
        folder = hashlib.sha256(str(workspace.folder).encode()).hexdigest()[:8]
        self._name = f"{machine.pipeline.name}.{folder}"  # of this pipeline among all
        self._shown = {name: (each.state, each.attempts) for name, each in machine.tasks.items()}

    def handle(self, event: AnyEvent) -> None:
        """An event and all that follows from it at once."""
        waiting = deque([event])
        while waiting:
            happened = waiting.popleft()
            self._record.append(happened)
            for action in self.machine.handle(happened):
                waiting.extend(self._do(action))
        for name, progress in self.machine.tasks.items():
            shown = (progress.state, progress.attempts)
            if self._shown[name] != shown:
                self._shown[name] = shown
                self._changed(progress)

    def run(self, first: AnyEvent, wait: bool = False) -> RunState:
        """Go on until the run has ended; ``wait``: also while only persons can go on."""
        pause = SHORTEST_PAUSE
        try:
            self.handle(first)
            while (state := self.machine.state) in ("running", "asking"):
                moved = self._poll_orders() | self._poll_attempts()
                pause = SHORTEST_PAUSE if moved else min(pause * 1.5, LONGEST_PAUSE)
                due = self.machine.next_time()
                if due is not None and time.time() >= due:
                    self.handle(TimePassed(time.time()))
                elif not moved and state == "asking" and not wait:
                    return state
                elif not moved:
                    time.sleep(pause)
            return state
        finally:
            for attempt in self._attempts.values():
                attempt.leave()

    def _poll_attempts(self) -> bool:
        ended = [
            (name, problem)
            for name, attempt in self._attempts.items()
            if (problem := attempt.poll()) is not None
        ]
        for name, problem in ended:
            del self._attempts[name]
            progress = self.machine.tasks[name]
            if progress.state not in ENDED:  # cancelled meanwhile
                self.handle(self._ended(progress, problem))
        return bool(ended)

    def _poll_orders(self) -> bool:
        orders = self._workspace.orders(self._number)
        for path in orders:
            order = msgspec.json.decode(path.read_bytes(), type=PersonOrder)
            if order.cancel:
                self.handle(RunCancelled(time.time(), order.who))
            elif self.machine.tasks[order.task].state is TaskState.ASKING:
                self.handle(TaskAnswered(time.time(), order.task, order.approved, order.who))
            else:
                continue  # it is early: the question comes yet
            path.unlink()
        return bool(orders) and len(orders) > len(self._workspace.orders(self._number))

    # Actions.

    def _do(self, action: Action) -> list[AnyEvent]:
        match action:
            case LookUp(task=name, key=key):
                found = self._workspace.look_up(key)
                if found is not None:
                    self._workspace.link(self.machine.tasks[name].task, found)
                return [LookedUp(time.time(), name, found)]
            case ReadRelease(task=name, model=model):
                return [self._release(name, model)]
            case StartTask():
                self._attempts[action.task] = self._start(action)
            case StopTask(task=name):
                if name in self._attempts:
                    self._attempts[name].stop()
            case KeepResult(task=name, key=key):
                self._workspace.prepare(key, keep=False)
                self._workspace.publish(key, self.machine.tasks[name].task)
        return []

    def _release(self, task: str, model: str) -> AnyEvent:
        try:
            release = self._registry.released(model) if model else None
        except RegistryError as error:
            return TaskFailed(time.time(), task, str(error))
        if release is None:
            return ReleaseRead(time.time(), task)
        return ReleaseRead(time.time(), task, release.version, release.scores)

    def _start(self, action: StartTask) -> Attempt:
        progress = self.machine.tasks[action.task]
        task = progress.task
        # By failures, not by attempts: one that an interruption left behind keeps its name.
        name = f"{self._name}.{task.name}.{action.key[:12]}.{progress.failures}"
        if task.step.kind not in DONE_HERE:
            work = self._workspace.work / action.key
            adopted = self._executor.adopt(name, self.machine.began, work)
            if adopted is not None:
                return adopted
        work = self._workspace.prepare(action.key, keep=_goes_on(task))
        match task.step.kind:
            case "register":
                return EndedAttempt(self._register(task))
            case "notify":
                return EndedAttempt(self._notify(task))
            case "train" if trained(work, next(iter(task.step.outputs.values()))):
                return EndedAttempt()
        for text in task.step.outputs.values():
            (work / text).parent.mkdir(parents=True, exist_ok=True)
        logs = self._workspace.run_folder(self._number) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        return self._executor.start(
            TaskOrder(
                task=task,
                name=name,
                command=step_command(task, self._inputs(task), work),
                work=work,
                log=logs / f"{task.name}.{action.attempt}.log",
            )
        )

    def _inputs(self, task: Task) -> dict[str, list[str]]:
        """Paths of what a task reads."""
        outputs = self.machine.inputs(task)
        return {
            name: [
                path
                for each, output in zip(reads, outputs[name], strict=True)
                for path in (
                    [str(self._workspace.folder / output.path)]
                    if isinstance(each, Produced)
                    else pattern_paths(each.pattern)
                )
            ]
            for name, reads in task.reads.items()
        }

    def _ended(self, progress: TaskProgress, problem: str) -> AnyEvent:
        """What became of an attempt: a result only if all of it is there."""
        task, now = progress.task, time.time()
        if not problem and task.step.kind == "train":
            done = trained(
                self._workspace.work / progress.key, next(iter(task.step.outputs.values()))
            )
            problem = "" if done else "it ended before its last step"
        if not problem and (changed := self._changed_inputs(task)):
            problem = f"{changed} changed while it ran: start a new run"
        if not problem:
            try:
                result = self._workspace.publish(progress.key, task)
            except UnfinishedOutput as error:
                problem = str(error)
            else:
                self._workspace.link(task, result)
                return TaskFinished(now, task.name, result)
        return TaskFailed(now, task.name, problem)

    def _changed_inputs(self, task: Task) -> str:
        """A raw input that is no longer what the run began with; "": none."""
        patterns = [
            each.pattern
            for reads in task.reads.values()
            for each in reads
            if isinstance(each, RawFiles)
        ]
        patterns += [task.step.job] if task.step.job else []
        return next(
            (
                each
                for each in patterns
                if self._hashes.of_pattern(each).content != self.machine.raw_inputs[each]
            ),
            "",
        )

    def _register(self, task: Task) -> str:
        try:
            manifest = self._workspace.run_folder(self._number) / "manifest.json"
            register_task(self._registry, task, self.machine, self._workspace.folder, manifest)
        except (RegistryError, ScoresError, OSError) as error:
            return str(error)
        return ""

    def _notify(self, task: Task) -> str:
        states = {name: each.state for name, each in self.machine.tasks.items()}
        body = {"kind": "pipeline", "pipeline": self.machine.pipeline.name, "tasks": states}
        scores = {
            name: each.result.scores
            for name, each in self.machine.tasks.items()
            if each.result.scores
        }
        problem = post(task.step.url, msgspec.json.encode({**body, "scores": scores}))
        return f"the receiver {problem}" if problem else ""


def _goes_on(task: Task) -> bool:
    """Whether an attempt goes on with what a killed one left."""
    tokenizes = task.step.kind == "data" and task.step.command[:1] == ("tokenize",)
    return tokenizes or task.step.kind == "train"
