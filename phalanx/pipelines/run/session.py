"""The operations on a pipeline: plan, run, resume, show, answer, cancel."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from phalanx import __version__
from phalanx.cluster.pipelines.description import PipelineFile, pipeline_from_table, read_pipeline
from phalanx.cluster.pipelines.events import (
    AnyEvent,
    LookedUp,
    LookUp,
    ReadRelease,
    RunBegan,
    RunCancelled,
    RunInterrupted,
    TaskResult,
    TaskState,
)
from phalanx.cluster.pipelines.graph import TaskGraph
from phalanx.cluster.pipelines.machine import PipelineMachine, RunState, TaskProgress
from phalanx.cluster.pipelines.rules import check_pipeline
from phalanx.config import ConfigError
from phalanx.pipelines.registry.promote import who
from phalanx.pipelines.run.attempts import Executor
from phalanx.pipelines.run.content import ContentCache, RawContent, has_files
from phalanx.pipelines.run.driver import PersonOrder, PipelineDriver
from phalanx.pipelines.run.manifest import MANIFEST_FILE, write_manifest, write_raw
from phalanx.pipelines.run.record import PipelineRecord, read_record
from phalanx.pipelines.run.step_work import read_release
from phalanx.pipelines.run.workspace import Workspace, WorkspaceError

Changed = Callable[[TaskProgress], None]

ANEW = "`phalanx pipeline run` starts another"


class PipelineRun(Struct, frozen=True):
    """A run rebuilt from its record."""

    number: int
    machine: PipelineMachine
    began_ns: int
    events: list[AnyEvent]


class RunEnd(Struct, frozen=True):
    """The state of a run when its driver ends."""

    number: int
    state: RunState
    machine: PipelineMachine
    manifest: Path | None  # None: it has not ended


class PipelineSession:
    """A valid pipeline file with its folder."""

    def __init__(self, table: dict[str, Any], exists: Callable[[str], bool] = has_files) -> None:
        self.table = table
        self.file: PipelineFile = pipeline_from_table(table)
        self.tasks: TaskGraph = check_pipeline(self.file, exists)
        self.workspace = Workspace(self.file.place)

    def raw_patterns(self) -> list[str]:
        """Paths of inputs that no step makes: raw files and job files."""
        found = (each for task in self.tasks.in_order for each in task.raw_patterns)
        return list(dict.fromkeys(found))

    def hash_inputs(self) -> dict[str, RawContent]:
        """Current content hashes of all raw files."""
        self.workspace.create()
        cache = ContentCache(self.workspace.hashes)
        contents = {pattern: cache.of_pattern(pattern) for pattern in self.raw_patterns()}
        cache.save()
        return contents

    def plan(self, *, approved: bool = False) -> PipelineMachine:
        """The machine of a hypothetical run: each task is cached or READY to run.

        ``approved``: as if every person asked agreed, to learn what is done behind them.
        """
        contents = self.hash_inputs()
        machine = PipelineMachine(self.file, self.tasks)
        registry = Path(self.file.registry)
        waiting: list[AnyEvent] = [self._began(contents, parallel=0)]
        while waiting:
            for action in machine.handle(waiting.pop()):
                if isinstance(action, LookUp):
                    found = self.workspace.look_up(action.key)
                    kind = machine.tasks[action.task].task.step.kind
                    if approved and kind == "approval":
                        found = TaskResult()
                    waiting.append(LookedUp(time.time_ns(), action.task, found))
                elif isinstance(action, ReadRelease):
                    waiting.append(read_release(registry, action.task, action.model))
        return machine

    def run(
        self, executor: Executor, changed: Changed, parallel: int = 0, wait: bool = False
    ) -> RunEnd:
        """Start a new run."""
        with self.workspace.locked():
            contents = self.hash_inputs()
            number = self.workspace.last_run() + 1
            write_raw(self.workspace.run_folder(number), contents)
            machine = PipelineMachine(self.file, self.tasks)
            first = self._began(contents, parallel or self.file.parallel)
            return self._drive(machine, number, first, executor, changed, wait)

    def _began(self, contents: dict[str, RawContent], parallel: int) -> RunBegan:
        hashes = {pattern: each.content for pattern, each in contents.items()}
        return RunBegan(time.time_ns(), self.table, hashes, __version__, parallel)

    def resume(
        self, executor: Executor, changed: Changed, parallel: int = 0, wait: bool = False
    ) -> RunEnd:
        """Continue the last run, with the pipeline file as of its start."""
        with self.workspace.locked():
            run = self.last_run()
            if run.machine.state not in ("running", "asking"):
                return self._ended(run)
            self._refuse_changed(run)
            first = RunInterrupted(time.time_ns(), parallel or self.file.parallel)
            return self._drive(run.machine, run.number, first, executor, changed, wait)

    def _ended(self, run: PipelineRun) -> RunEnd:
        """Finish a run that was killed before writing its manifest; refuse any other."""
        manifest = self.workspace.run_folder(run.number) / MANIFEST_FILE
        if manifest.exists():
            text = f"run {run.number} is {run.machine.state}: {ANEW}"
            raise WorkspaceError(f"{text} (steps that are done are not repeated)")
        write_manifest(manifest.parent, run.machine, run.events)
        return RunEnd(run.number, run.machine.state, run.machine, manifest)

    def _refuse_changed(self, run: PipelineRun) -> None:
        """Refuse to continue after Phalanx or a raw file changed: keys would not match."""
        if run.machine.version != __version__:
            text = f"run {run.number} was begun by Phalanx {run.machine.version}"
            raise WorkspaceError(f"{text}: {ANEW}")
        now = self.hash_inputs()
        for pattern, content in run.machine.raw_inputs.items():
            if now[pattern].content != content:
                rule = f"has changed since run {run.number} began"
                fix = "start a new run: steps that do not read it are not repeated"
                raise ConfigError(pattern, "", rule, fix)

    def _drive(
        self,
        machine: PipelineMachine,
        number: int,
        first: AnyEvent,
        executor: Executor,
        changed: Changed,
        wait: bool,
    ) -> RunEnd:
        folder = self.workspace.run_folder(number)
        record = PipelineRecord(self.workspace.record(number))
        try:
            driver = PipelineDriver(machine, self.workspace, number, record, executor, changed)
            state = driver.run(first, wait)
        finally:
            record.close()
        if state == "asking":
            return RunEnd(number, state, machine, None)
        write_manifest(folder, machine, read_record(self.workspace.record(number)))
        return RunEnd(number, state, machine, folder / MANIFEST_FILE)

    def last_run(self, number: int = 0) -> PipelineRun:
        """A run, read from its record; 0: the newest."""
        number = number or self.workspace.last_run()
        events = read_record(self.workspace.record(number)) if number else []
        if not events:
            which = f"run {number}" if number else "runs yet"
            raise WorkspaceError(f"{self.workspace.folder} has no {which}: {ANEW}")
        machine = PipelineMachine(self.file, self.tasks)
        for event in events:
            machine.handle(event)
        return PipelineRun(number, machine, events[0].time_ns, events)

    def cancel(self, why: str = "") -> str:
        """Cancel the last run, whichever process drives it; return a sentence about it."""
        run = self.last_run()
        if run.machine.state not in ("running", "asking"):
            return f"run {run.number} is {run.machine.state} already"
        try:
            with self.workspace.locked():
                record = PipelineRecord(self.workspace.record(run.number))
                record.append(RunCancelled(time.time_ns(), who(), why))
                record.close()
            return f"run {run.number} is cancelled"
        except WorkspaceError:
            self.workspace.order(run.number, "cancel", PersonOrder(who(), cancel=True, why=why))
            return f"run {run.number} has been asked to stop"

    def questions(self) -> dict[str, str]:
        """Open questions of the last run, by task."""
        return {
            name: each.task.step.question
            for name, each in self.last_run().machine.tasks.items()
            if each.state is TaskState.ASKING
        }

    def answer(self, task: str, approved: bool, why: str = "") -> str:
        """Answer a task's question; return a sentence about it."""
        run = self.last_run()
        asking = self.questions()
        if task not in asking:
            open_ones = ", ".join(asking) or "nothing"
            raise WorkspaceError(
                f"run {run.number} asks nothing called {task} (it asks: {open_ones})"
            )
        name = f"answer-{os.getpid()}-{time.time_ns()}"
        order = PersonOrder(who(), task=task, approved=approved, why=why)
        self.workspace.order(run.number, name, order)
        decision = "approved" if approved else "rejected"
        return f"{task} is {decision}: run {run.number} goes on with it"


def open_pipeline(path: Path) -> PipelineSession:
    """The pipeline of a file; ConfigError with every mistake."""
    return PipelineSession(read_pipeline(path)[1])


def recorded_pipeline(path: Path, number: int = 0) -> PipelineSession:
    """The pipeline as of the start of its last run."""
    workspace = Workspace(read_pipeline(path)[0].place)
    number = number or workspace.last_run()
    events = read_record(workspace.record(number)) if number else []
    if not events or not isinstance(events[0], RunBegan):
        which = f"run {number}" if number else "runs yet"
        raise WorkspaceError(f"{workspace.folder} has no {which}: {ANEW}")
    return PipelineSession(events[0].pipeline, exists=lambda pattern: True)
