"""The driver of a run: records events, asks the machine for decisions, carries them out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx.cluster.pipelines.events import (
    ENDED,
    Action,
    AnyEvent,
    KeepResult,
    LookedUp,
    LookUp,
    ReadRelease,
    RunCancelled,
    StartTask,
    StopTask,
    TaskAnswered,
    TaskFailed,
    TaskFinished,
    TaskState,
    TimePassed,
)
from phalanx.cluster.pipelines.machine import PipelineMachine, RunState, TaskProgress
from phalanx.cluster.pipelines.step_order import step_order
from phalanx.pipelines.registry.models import RegistryError
from phalanx.pipelines.run.attempts import (
    Attempt,
    EndedAttempt,
    Executor,
    ProcessOrder,
    log_name,
)
from phalanx.pipelines.run.content import ContentCache
from phalanx.pipelines.run.record import PipelineRecord
from phalanx.pipelines.run.step_work import DONE_AT_ONCE, StepWork, read_release
from phalanx.pipelines.run.workspace import UnfinishedOutput, Workspace

SHORTEST_PAUSE, LONGEST_PAUSE = 0.002, 0.1  # seconds between two looks


class PersonOrder(Struct, frozen=True, omit_defaults=True):
    """A person's order to a run: an answer, or to cancel it."""

    who: str
    cancel: bool = False
    task: str = ""
    approved: bool = False
    why: str = ""


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
        self._attempts: dict[str, Attempt] = {}
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
        """Run until the end; ``wait``: also wait while only a person's answer is missing."""
        pause = SHORTEST_PAUSE
        try:
            self.handle(first)
            while (state := self.machine.state) in ("running", "asking"):
                moved = self._poll_orders() | self._poll_attempts()
                pause = SHORTEST_PAUSE if moved else min(pause * 1.5, LONGEST_PAUSE)
                due_ns = self.machine.next_time_ns()
                if due_ns is not None and time.time_ns() >= due_ns:
                    self.handle(TimePassed(time.time_ns()))
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
                self.handle(RunCancelled(time.time_ns(), order.who, order.why))
            elif self.machine.tasks[order.task].state is TaskState.ASKING:
                self.handle(
                    TaskAnswered(time.time_ns(), order.task, order.approved, order.who, order.why)
                )
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
                    self._workspace.link(self.machine.tasks[name].task.step, found)
                return [LookedUp(time.time_ns(), name, found)]
            case ReadRelease(task=name, model=model):
                return [self._release(name, model)]
            case StartTask():
                self._attempts[action.task] = self._start(action)
            case StopTask(task=name):
                if name in self._attempts:
                    self._attempts[name].stop()
            case KeepResult(task=name, key=key):
                self._workspace.prepare(key, keep=False)
                self._workspace.publish(key, name, self.machine.tasks[name].task.step)
        return []

    def _release(self, task: str, model: str) -> AnyEvent:
        try:
            return read_release(Path(self.machine.pipeline.registry), task, model)
        except RegistryError as error:
            return TaskFailed(time.time_ns(), task, str(error))

    def _work(self, task: str) -> StepWork:
        run = self._workspace.run_folder(self._number).name
        order = step_order(self.machine, task, str(self._workspace.folder), run)
        return StepWork(order, self._workspace, self._hashes)

    def _start(self, action: StartTask) -> Attempt:
        work = self._work(action.task)
        kind = work.order.step.kind
        if kind not in DONE_AT_ONCE:
            self._executor.end_leftovers(work.work)
        work.prepare()
        if kind in DONE_AT_ONCE:
            return EndedAttempt(work.do_at_once())
        if kind == "train" and work.trained():
            return EndedAttempt()
        logs = self._workspace.run_folder(self._number) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        return self._executor.start(
            ProcessOrder(
                command=work.command(),
                work=work.work,
                log=logs / log_name(action.task, action.attempt),
                gpus=work.order.step.gpus,
            )
        )

    def _ended(self, progress: TaskProgress, problem: str) -> AnyEvent:
        """The event for an ended attempt: a result only if every output is complete."""
        name, now_ns = progress.task.name, time.time_ns()
        if not problem:
            try:
                return TaskFinished(now_ns, name, self._work(name).result())
            except UnfinishedOutput as error:
                problem = str(error)
        return TaskFailed(now_ns, name, problem)
