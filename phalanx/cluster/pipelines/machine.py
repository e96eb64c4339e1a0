"""A run of a pipeline as a pure machine: events in, actions out; it reads no clock and no file.

Events carry their time. Played again, they lead to the same state: a run that was interrupted goes
on from its record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from phalanx.cluster.pipelines.conditions import Condition, JudgedCondition, judge, parse_metric
from phalanx.cluster.pipelines.description import PipelineFile
from phalanx.cluster.pipelines.events import (
    BAD,
    ENDED,
    GOOD,
    Action,
    AnyEvent,
    AttemptBegan,
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
from phalanx.cluster.pipelines.graph import Produced, RawFiles, Task, TaskGraph, WaitsFor
from phalanx.cluster.pipelines.keys import task_key

SECOND_NS = 1_000_000_000
HOUR_NS = 3600 * SECOND_NS
MOST_BACKOFF_NS = HOUR_NS
JOB_INPUT = "job"  # the job file of a train step counts as an input of this name
APPROVED = "approved"  # likewise what a person approves
SPENT = "the budget is spent"
UNCACHED = ("notify",)  # done anew in every run

RunState = Literal["running", "asking", "done", "failed", "cancelled"]


class TaskProgress:
    """Progress of a task."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.state = TaskState.WAITING
        self.reason = ""
        self.key = ""
        self.attempts = 0  # begun
        self.failures = 0
        self.result = TaskResult()
        self.released: dict[str, float] | None = None
        self.begun_ns = self.ended_ns = 0  # the last attempt
        self.spent_ns = 0  # of all attempts that have ended
        self.not_before_ns = 0
        self.stopping = ""  # why it was told to stop

    @property
    def took_ns(self) -> int:
        """Time of the last attempt, if it has ended."""
        return max(0, self.ended_ns - self.begun_ns) if self.begun_ns else 0

    def used_ns(self, now_ns: int) -> int:
        """Time of all attempts, failed ones too; of one that runs, so far."""
        runs = self.state is TaskState.RUNNING and self.begun_ns
        return self.spent_ns + (max(0, now_ns - self.begun_ns) if runs else 0)


class PipelineMachine:
    """The state machine of a run."""

    def __init__(self, pipeline: PipelineFile, tasks: TaskGraph) -> None:
        self.pipeline = pipeline
        self.tasks = {task.name: TaskProgress(task) for task in tasks.in_order}
        self._matching = tasks.matching
        self._parallel = 0  # as whoever began the run, or went on with it, wants it
        self.raw_inputs: dict[str, str] = {}  # hashes by pattern
        self.version = ""  # of Phalanx
        self._now_ns = self.began_ns = 0
        self.spent_ns = self.spent_gpu_ns = 0  # of attempts that have ended
        self._queued = False  # attempts wait in a queue before they begin
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
        """Apply an event and return the actions that follow."""
        self._actions = []
        if isinstance(event, RunInterrupted):
            self._interrupt()  # before its time: what was under way ended with the last event
        self._now_ns = max(self._now_ns, event.time_ns)
        match event:
            case RunBegan():
                self.raw_inputs, self.version = event.inputs, event.version
                self.began_ns, self._parallel = event.time_ns, event.parallel
                self._queued = event.queued
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

    def next_time_ns(self) -> int | None:
        """The next time at which something is due; None if nothing is."""
        times = [each.not_before_ns for each in self._in(TaskState.RETRYING)]
        for each in self._in(TaskState.RUNNING):
            limit_ns = _limit_ns(each.task)
            if limit_ns and each.begun_ns and not each.stopping:
                times.append(each.begun_ns + limit_ns)
        for left_ns, rate in self._budgets():
            if rate and not all(each.stopping for each in self._in(TaskState.RUNNING)):
                times.append(self._now_ns + -(-max(0, left_ns) // rate))
        return min(times, default=None)

    def inputs(self, task: Task) -> dict[str, list[Output]]:
        """Inputs of a task by name once all are complete; raw files by pattern."""
        outputs: dict[str, list[Output]] = {}
        for name, reads in task.reads.items():
            outputs[name] = [
                self.tasks[each.task].result.outputs[each.output]
                if isinstance(each, Produced)
                else Output(each.pattern, self.raw_inputs[each.pattern])
                for each in reads
            ]
        return outputs

    # What happened to a task.

    def _about_task(
        self,
        event: LookedUp | ReleaseRead | AttemptBegan | TaskFinished | TaskFailed | TaskAnswered,
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
                progress.begun_ns = self._now_ns
            case ReleaseRead():
                progress.released, progress.state = dict(event.scores), TaskState.WAITING
            case AttemptBegan():
                progress.begun_ns = progress.begun_ns or self._now_ns
            case TaskFinished():
                self._book(progress)
                self._end(progress, TaskState.DONE, "", event.result)
            case TaskFailed():
                self._book(progress)
                self._fail(progress, progress.stopping or event.reason)
            case TaskAnswered(approved=True):
                self._end(progress, TaskState.DONE, event.by_whom("approved"))
                self._actions.append(KeepResult(progress.task.name, progress.key))
            case TaskAnswered():
                self._end(progress, TaskState.FAILED, event.by_whom("rejected"))

    def _fail(self, progress: TaskProgress, reason: str) -> None:
        progress.failures += 1
        step = progress.task.step
        if progress.failures > step.retries or progress.state is TaskState.LOOKING:
            self._end(progress, TaskState.FAILED, reason)
            return
        doubled_ns = round(step.backoff_seconds * SECOND_NS) << (progress.failures - 1)
        pause_ns = min(doubled_ns, MOST_BACKOFF_NS)
        progress.state, progress.reason = TaskState.RETRYING, reason
        progress.not_before_ns, progress.stopping = self._now_ns + pause_ns, ""

    def _end(
        self,
        progress: TaskProgress,
        state: TaskState,
        reason: str,
        result: TaskResult | None = None,
    ) -> None:
        progress.state, progress.reason = state, reason
        progress.result = result or TaskResult()
        progress.ended_ns = self._now_ns

    def _book(self, progress: TaskProgress) -> None:
        """Count the time of an attempt that ends."""
        if progress.state is not TaskState.RUNNING or not progress.begun_ns:
            return
        took_ns = max(0, self._now_ns - progress.begun_ns)
        progress.spent_ns += took_ns
        self.spent_ns += took_ns
        self.spent_gpu_ns += took_ns * progress.task.step.gpus

    # What happened to the run.

    def _interrupt(self) -> None:
        """Restart interrupted attempts, without counting them as failures."""
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
                self._end(each, TaskState.CANCELLED, event.by_whom("cancelled"))

    def _stop_overdue(self) -> None:
        spent = self._spent()
        for each in self._in(TaskState.RUNNING):
            limit_ns = _limit_ns(each.task)
            if spent:
                self._stop(each, SPENT)
            elif limit_ns and each.begun_ns and self._now_ns >= each.begun_ns + limit_ns:
                self._stop(each, f"took more than {each.task.step.timeout_minutes:g} minutes")

    def _stop(self, progress: TaskProgress, reason: str) -> None:
        if not progress.stopping:
            progress.stopping = reason
            self._actions.append(StopTask(progress.task.name))

    def _spent(self) -> bool:
        return any(left_ns <= 0 for left_ns, _ in self._budgets())

    def _budgets(self) -> Iterator[tuple[int, int]]:
        """What is left of each budget, running attempts included, and how fast it is used."""
        running = [each for each in self._in(TaskState.RUNNING) if each.begun_ns]
        budget = self.pipeline.budget
        for hours, spent_ns, rates in (
            (budget.hours, self.spent_ns, [1] * len(running)),
            (budget.gpu_hours, self.spent_gpu_ns, [each.task.step.gpus for each in running]),
        ):
            if hours is not None:
                used_ns = sum(
                    rate * (self._now_ns - each.begun_ns)
                    for each, rate in zip(running, rates, strict=True)
                )
                yield round(hours * HOUR_NS) - spent_ns - used_ns, sum(rates)

    def _in(self, state: TaskState) -> Iterator[TaskProgress]:
        return (each for each in self.tasks.values() if each.state is state)

    # What comes next.

    def _advance(self) -> None:
        """Make all decisions that are possible now, in the order of the tasks."""
        while True:
            for each in self.tasks.values():
                if each.state is TaskState.WAITING:
                    self._decide(each)
            for each in self._in(TaskState.RETRYING):
                if each.not_before_ns <= self._now_ns:
                    each.state = TaskState.READY
            startable = list(self._in(TaskState.READY))
            if not (startable and self._spent()):
                break
            for each in startable:
                self._end(each, TaskState.FAILED, SPENT)
        running = sum(1 for _ in self._in(TaskState.RUNNING))
        for each in startable[: max(0, self._parallel - running)]:
            each.attempts += 1
            each.state, each.begun_ns = TaskState.RUNNING, 0 if self._queued else self._now_ns
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
        """Start a task whose dependencies are met."""
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
        """The outputs with the best score; the first among equals."""
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


def _limit_ns(task: Task) -> int:
    """Time limit of an attempt; 0: none."""
    return round(task.step.timeout_minutes * 60 * SECOND_NS)


def _met(waits: WaitsFor, state: TaskState) -> TaskState | None:
    """State of a dependency: DONE if met, BLOCKED or SKIPPED if it never will be, None if open."""
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
