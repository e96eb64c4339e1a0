"""A run of a pipeline as a pure machine: events in, actions out; it reads no clock and no file.

Events carry their time. Played again, they lead to the same state: a run that was interrupted goes
on from its record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from phalanx.pipelines.conditions import Condition, JudgedCondition, judge, parse_metric
from phalanx.pipelines.description import PipelineFile
from phalanx.pipelines.events import (
    BAD,
    ENDED,
    GOOD,
    Action,
    AnyEvent,
    KeepResult,
    LookedUp,
    LookUp,
    Output,
    ReadRelease,
    ReleaseRead,
    RunBegan,
    RunCancelled,
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
from phalanx.pipelines.graph import Produced, RawFiles, Task, TaskGraph, WaitsFor
from phalanx.pipelines.keys import task_key

MOST_BACKOFF_SECONDS = 3600.0
JOB_INPUT = "job"  # the job file of a train step counts as an input of this name
APPROVED = "approved"  # likewise what a person approves
SPENT = "the budget is spent"
A_MOMENT = 1e-3  # seconds: sums of times are not exact
UNCACHED = ("notify",)  # done anew in every run

RunState = Literal["running", "asking", "done", "failed", "cancelled"]


class TaskProgress:
    """How far a task of the run is."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.state = TaskState.WAITING
        self.reason = ""
        self.key = ""
        self.attempts = 0  # begun
        self.failures = 0
        self.result = TaskResult()
        self.released: dict[str, float] | None = None
        self.begun = self.ended = 0.0  # the last attempt
        self.not_before = 0.0
        self.stopping = ""  # why it was told to stop

    @property
    def seconds(self) -> float:
        """That the last attempt took, if it has ended."""
        return max(0.0, self.ended - self.begun) if self.begun else 0.0


class PipelineMachine:
    """The run: which tasks are done, which comes next, and why."""

    def __init__(self, pipeline: PipelineFile, tasks: TaskGraph) -> None:
        self.pipeline = pipeline
        self.tasks = {task.name: TaskProgress(task) for task in tasks.in_order}
        self._matching = tasks.matching
        self._parallel = 0  # as whoever began the run, or went on with it, wants it
        self.raw_inputs: dict[str, str] = {}  # hashes by pattern
        self.version = ""  # of Phalanx
        self._now = self.began = 0.0
        self.spent_seconds = self.spent_gpu_seconds = 0.0  # of attempts that have ended
        self._cancelled = False
        self._actions: list[Action] = []

    @property
    def state(self) -> RunState:
        """Of the run as a whole."""
        states = {each.state for each in self.tasks.values()}
        if states <= ENDED:
            if self._cancelled and TaskState.CANCELLED in states:
                return "cancelled"
            return "failed" if states & BAD else "done"
        rest = states - ENDED - {TaskState.WAITING}
        return "asking" if rest == {TaskState.ASKING} else "running"

    def handle(self, event: AnyEvent) -> list[Action]:
        """What to do about an event."""
        self._actions = []
        if isinstance(event, RunInterrupted):
            self._interrupt()  # before its time: what was under way ended with the last event
        self._now = max(self._now, event.time)
        match event:
            case RunBegan():
                self.raw_inputs, self.version = event.inputs, event.version
                self.began, self._parallel = event.time, event.parallel
            case RunInterrupted():
                self._parallel = event.parallel
            case RunCancelled():
                self._cancel(event)
            case TimePassed():
                self._stop_overdue()
            case _:
                self._about_task(event, self.tasks[event.task])
        self._advance()
        return self._actions

    def next_time(self) -> float | None:
        """When time alone changes something; None: never."""
        times = [each.not_before for each in self._in(TaskState.RETRYING)]
        for each in self._in(TaskState.RUNNING):
            limit = each.task.step.timeout_minutes * 60
            times += [each.begun + limit] if limit and not each.stopping else []
        for left, rate in self._budgets():
            if rate and not all(each.stopping for each in self._in(TaskState.RUNNING)):
                times.append(self._now + max(0.0, left) / rate)
        return min(times, default=None)

    def inputs(self, task: Task) -> dict[str, list[Output]]:
        """What a task reads, by name, once all of it is there; raw files have their pattern."""
        found: dict[str, list[Output]] = {}
        for name, reads in task.reads.items():
            found[name] = [
                self.tasks[each.task].result.outputs[each.output]
                if isinstance(each, Produced)
                else Output(each.pattern, self.raw_inputs[each.pattern])
                for each in reads
            ]
        return found

    # What happened to a task.

    def _about_task(
        self,
        event: LookedUp | ReleaseRead | TaskFinished | TaskFailed | TaskAnswered,
        progress: TaskProgress,
    ) -> None:
        if progress.state in ENDED:
            return  # cancelled meanwhile
        match event:
            case LookedUp(result=TaskResult() as result):
                self._end(progress, TaskState.CACHED, "nothing that it reads has changed", result)
            case LookedUp():
                asks = progress.task.step.kind == "approval"
                progress.state = TaskState.ASKING if asks else TaskState.READY
                progress.begun = self._now
            case ReleaseRead():
                progress.released, progress.state = dict(event.scores), TaskState.WAITING
            case TaskFinished():
                self._book(progress)
                self._end(progress, TaskState.DONE, "", event.result)
            case TaskFailed():
                self._book(progress)
                self._fail(progress, progress.stopping or event.reason)
            case TaskAnswered(approved=True):
                self._end(progress, TaskState.DONE, f"approved by {event.who or 'somebody'}")
                self._actions.append(KeepResult(progress.task.name, progress.key))
            case TaskAnswered():
                self._end(progress, TaskState.FAILED, f"rejected by {event.who or 'somebody'}")

    def _fail(self, progress: TaskProgress, reason: str) -> None:
        progress.failures += 1
        step = progress.task.step
        if progress.failures > step.retries:
            self._end(progress, TaskState.FAILED, reason)
            return
        pause = min(step.backoff_seconds * 2 ** (progress.failures - 1), MOST_BACKOFF_SECONDS)
        progress.state, progress.reason = TaskState.RETRYING, reason
        progress.not_before, progress.stopping = self._now + pause, ""

    def _end(
        self,
        progress: TaskProgress,
        state: TaskState,
        reason: str,
        result: TaskResult | None = None,
    ) -> None:
        progress.state, progress.reason = state, reason
        progress.result = result or TaskResult()
        progress.ended = self._now

    def _book(self, progress: TaskProgress) -> None:
        """Count the time of an attempt that ends."""
        if progress.state is not TaskState.RUNNING:
            return
        seconds = max(0.0, self._now - progress.begun)
        self.spent_seconds += seconds
        self.spent_gpu_seconds += seconds * progress.task.step.gpus

    # What happened to the run.

    def _interrupt(self) -> None:
        """Attempts that were under way are begun again, and do not count as failures."""
        for each in self.tasks.values():
            if each.state is TaskState.RUNNING:
                self._book(each)
                each.stopping = ""
            if each.state in (TaskState.RUNNING, TaskState.LOOKING):
                each.state = TaskState.WAITING

    def _cancel(self, event: RunCancelled) -> None:
        self._cancelled = True
        for each in self.tasks.values():
            if each.state is TaskState.RUNNING:
                self._book(each)
                self._actions.append(StopTask(each.task.name))
            if each.state not in ENDED:
                self._end(each, TaskState.CANCELLED, f"cancelled by {event.who or 'somebody'}")

    def _stop_overdue(self) -> None:
        spent = self._spent()
        for each in self._in(TaskState.RUNNING):
            limit = each.task.step.timeout_minutes
            if spent:
                self._stop(each, SPENT)
            elif limit and self._now >= each.begun + limit * 60:
                self._stop(each, f"took more than {limit:g} minutes")

    def _stop(self, progress: TaskProgress, reason: str) -> None:
        if not progress.stopping:
            progress.stopping = reason
            self._actions.append(StopTask(progress.task.name))

    def _spent(self) -> bool:
        return any(left < A_MOMENT for left, _ in self._budgets())

    def _budgets(self) -> Iterator[tuple[float, float]]:
        """Seconds left of each budget, attempts under way counted, and how fast it goes."""
        running = list(self._in(TaskState.RUNNING))
        budget = self.pipeline.budget
        for hours, spent, rates in (
            (budget.hours, self.spent_seconds, [1.0] * len(running)),
            (budget.gpu_hours, self.spent_gpu_seconds, [each.task.step.gpus for each in running]),
        ):
            if hours is not None:
                used = sum(
                    rate * (self._now - each.begun)
                    for each, rate in zip(running, rates, strict=True)
                )
                yield hours * 3600 - spent - used, float(sum(rates))

    def _in(self, state: TaskState) -> Iterator[TaskProgress]:
        return (each for each in self.tasks.values() if each.state is state)

    # What comes next.

    def _advance(self) -> None:
        """Everything that can be decided, in the tasks' order; those before come first."""
        while True:
            for each in self.tasks.values():
                if each.state is TaskState.WAITING:
                    self._decide(each)
            for each in self._in(TaskState.RETRYING):
                if each.not_before <= self._now:
                    each.state = TaskState.READY
            startable = list(self._in(TaskState.READY))
            if not (startable and self._spent()):
                break
            for each in startable:
                self._end(each, TaskState.FAILED, SPENT)
        running = sum(1 for _ in self._in(TaskState.RUNNING))
        for each in startable[: max(0, self._parallel - running)]:
            each.attempts += 1
            each.state, each.begun = TaskState.RUNNING, self._now
            self._actions.append(StartTask(each.task.name, each.key, each.attempts))

    def _decide(self, progress: TaskProgress) -> None:
        task = progress.task
        for waits in task.waits:
            met = _met(waits, self.tasks[waits.task].state)
            if met is None:
                return
            if met is not TaskState.DONE:
                other = self.tasks[waits.task]
                self._end(progress, met, f"{waits.task} is {other.state}")
                return
        if task.wants_release and progress.released is None:
            progress.state = TaskState.LOOKING
            self._actions.append(ReadRelease(task.name, task.step.model))
            return
        for condition in task.when:
            judgement = self._judged(condition, progress)
            if not judgement.holds:
                self._end(progress, TaskState.SKIPPED, judgement.reason)
                return
        self._begin(progress)

    def _begin(self, progress: TaskProgress) -> None:
        """What a task does once nothing keeps it."""
        task = progress.task
        if task.step.kind == "gate":
            judgements = [self._judged(each, progress) for each in task.require]
            failing = [each.reason for each in judgements if not each.holds]
            state = TaskState.FAILED if failing else TaskState.DONE
            self._end(progress, state, "; ".join(failing or [each.reason for each in judgements]))
        elif task.step.kind == "best":
            chosen, reason = self._best(task)
            self._end(progress, TaskState.DONE, reason, chosen)
        else:
            progress.key = task_key(task, self._contents(task), self.version)
            if task.step.kind in UNCACHED:
                progress.state = TaskState.READY
            else:
                progress.state = TaskState.LOOKING
                self._actions.append(LookUp(task.name, progress.key))

    def _contents(self, task: Task) -> dict[str, list[str]]:
        """What a task's result depends on, beside what it runs."""
        contents = {
            name: [each.content for each in outputs] for name, outputs in self.inputs(task).items()
        }
        if task.step.job:
            contents[JOB_INPUT] = [self.raw_inputs[task.step.job]]
        if task.step.kind == "approval":  # it is for what was made so far, and for nothing else
            contents[APPROVED] = [self._identity(waits.task) for waits in task.waits]
        return contents

    def _identity(self, name: str) -> str:
        """The key of a task, or of all that it waits for where it makes nothing by itself."""
        progress = self.tasks[name]
        if progress.key:
            return progress.key
        return " ".join([name, *(self._identity(waits.task) for waits in progress.task.waits)])

    def _judged(self, condition: Condition, progress: TaskProgress) -> JudgedCondition:
        metric = condition.name.metric
        scores = {
            name: self.tasks[name].result.scores[metric]
            for name in progress.task.measured[str(condition.name)]
        }
        return judge(condition, scores, progress.released or {})

    def _best(self, task: Task) -> tuple[TaskResult, str]:
        """The outputs that belong to the best score; of equals the first."""
        metric = parse_metric(task.step.by).metric
        measured = [self.tasks[name] for name in task.measured[task.step.by]]
        sign = 1 if task.step.better == "lower" else -1
        best = min(measured, key=lambda each: sign * each.result.scores[metric])
        outputs: dict[str, Output] = {}
        for name, reads in task.reads.items():
            of_best = set(self._matching(_step(reads), best.task.values))
            (chosen,) = (each for each in _made(reads) if each.task in of_best)
            outputs[name] = self.tasks[chosen.task].result.outputs[chosen.output]
        reason = f"{best.task.name}.{metric} is {best.result.scores[metric]:.6g}"
        return TaskResult(outputs, best.result.scores), reason


def _met(waits: WaitsFor, state: TaskState) -> TaskState | None:
    """DONE: it has come true; BLOCKED or SKIPPED: it never will; None: not yet."""
    if state not in ENDED:
        return None
    if waits.end == "any":
        return TaskState.DONE
    if waits.end == "fail":
        return TaskState.DONE if state in BAD else TaskState.SKIPPED
    if state in GOOD:
        return TaskState.DONE
    return TaskState.BLOCKED if state in BAD else TaskState.SKIPPED


def _made(reads: Iterable[Produced | RawFiles]) -> Iterator[Produced]:
    return (each for each in reads if isinstance(each, Produced))


def _step(reads: Iterable[Produced | RawFiles]) -> str:
    return next(_made(reads)).task.partition("[")[0]
