"""What people ask of a pipeline: plan it, run it, go on with it, look at it, end it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from phalanx import __version__
from phalanx.config import ConfigError
from phalanx.data.durable_files import write_atomically
from phalanx.pipelines.description import PipelineFile, pipeline_from_table, read_pipeline
from phalanx.pipelines.events import (
    AnyEvent,
    LookedUp,
    LookUp,
    ReadRelease,
    ReleaseRead,
    RunBegan,
    RunCancelled,
    RunInterrupted,
    TaskState,
)
from phalanx.pipelines.graph import RawFiles, TaskGraph
from phalanx.pipelines.machine import PipelineMachine, RunState, TaskProgress
from phalanx.pipelines.registry.models import ModelRegistry
from phalanx.pipelines.registry.promote import who
from phalanx.pipelines.rules import check_pipeline
from phalanx.pipelines.run.attempts import Executor
from phalanx.pipelines.run.content import ContentCache, RawContent, has_files
from phalanx.pipelines.run.driver import PersonOrder, PipelineDriver
from phalanx.pipelines.run.manifest import MANIFEST_FILE, RAW_FILE, write_manifest
from phalanx.pipelines.run.record import PipelineRecord, read_record
from phalanx.pipelines.run.workspace import Workspace, WorkspaceError

Changed = Callable[[TaskProgress], None]


class PipelineRun(Struct, frozen=True):
    """A run as its record tells it."""

    number: int
    machine: PipelineMachine
    began: float
    events: list[AnyEvent]


class RunEnd(Struct, frozen=True):
    """Where a run is when its driver ends."""

    number: int
    state: RunState
    machine: PipelineMachine
    manifest: Path | None  # None: it has not ended


class PipelineSession:
    """A pipeline's file that follows the rules, and its folder."""

    def __init__(self, table: dict[str, Any], exists: Callable[[str], bool] = has_files) -> None:
        self.table = table
        self.file: PipelineFile = pipeline_from_table(table)
        self.tasks: TaskGraph = check_pipeline(self.file, exists)
        self.workspace = Workspace(self.file.place)

    def raw_patterns(self) -> list[str]:
        """Files that no step makes: raw inputs and job files."""
        found = [
            each.pattern
            for task in self.tasks.in_order
            for reads in task.reads.values()
            for each in reads
            if isinstance(each, RawFiles)
        ]
        found += [task.step.job for task in self.tasks.in_order if task.step.job]
        return list(dict.fromkeys(found))

    def hash_inputs(self) -> dict[str, RawContent]:
        """What all raw files hold now."""
        self.workspace.create()
        cache = ContentCache(self.workspace.hashes)
        contents = {pattern: cache.of_pattern(pattern) for pattern in self.raw_patterns()}
        cache.save()
        return contents

    def plan(self) -> PipelineMachine:
        """The machine of a run in which nothing is started: tasks are cached, or READY to run."""
        contents = self.hash_inputs()
        machine = PipelineMachine(self.file, self.tasks)
        registry = ModelRegistry(Path(self.file.registry))
        waiting: list[AnyEvent] = [self._began(contents, parallel=0)]
        while waiting:
            for action in machine.handle(waiting.pop()):
                if isinstance(action, LookUp):
                    found = self.workspace.look_up(action.key)
                    waiting.append(LookedUp(time.time(), action.task, found))
                elif isinstance(action, ReadRelease):
                    release = registry.released(action.model) if action.model else None
                    scores = release.scores if release else {}
                    waiting.append(ReleaseRead(time.time(), action.task, 0, scores))
        return machine

    def run(
        self, executor: Executor, changed: Changed, parallel: int = 0, wait: bool = False
    ) -> RunEnd:
        """Begin a new run."""
        with self.workspace.locked():
            contents = self.hash_inputs()
            number = self.workspace.last_run() + 1
            folder = self.workspace.run_folder(number)
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / RAW_FILE, msgspec.json.encode(contents))
            machine = PipelineMachine(self.file, self.tasks)
            first = self._began(contents, parallel or self.file.parallel)
            return self._drive(machine, number, first, executor, changed, wait)

    def _began(self, contents: dict[str, RawContent], parallel: int) -> RunBegan:
        hashes = {pattern: each.content for pattern, each in contents.items()}
        return RunBegan(time.time(), self.table, hashes, __version__, parallel)

    def resume(
        self, executor: Executor, changed: Changed, parallel: int = 0, wait: bool = False
    ) -> RunEnd:
        """Go on with the last run, by the file as it was when that began."""
        with self.workspace.locked():
            run = self.last_run()
            if run.machine.state not in ("running", "asking"):
                return self._ended(run)
            self._refuse_changed(run)
            first = RunInterrupted(time.time(), parallel or self.file.parallel)
            return self._drive(run.machine, run.number, first, executor, changed, wait)

    def _ended(self, run: PipelineRun) -> RunEnd:
        """A run that was killed when only its manifest was missing gets that; others have ended."""
        manifest = self.workspace.run_folder(run.number) / MANIFEST_FILE
        if manifest.exists():
            text = f"run {run.number} is {run.machine.state}: start a new one"
            raise WorkspaceError(f"{text} (steps that are done are not repeated)")
        write_manifest(manifest.parent, run.machine, run.events)
        return RunEnd(run.number, run.machine.state, run.machine, manifest)

    def _refuse_changed(self, run: PipelineRun) -> None:
        """What is made from now on would not be what the run's keys say."""
        if run.machine.version != __version__:
            text = f"run {run.number} was begun by Phalanx {run.machine.version}: start a new one"
            raise WorkspaceError(text)
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
        """A run by its record; 0: the newest."""
        number = number or self.workspace.last_run()
        events = read_record(self.workspace.record(number)) if number else []
        if not events:
            which = f"run {number}" if number else "runs yet"
            raise WorkspaceError(f"{self.workspace.folder} has no {which}")
        machine = PipelineMachine(self.file, self.tasks)
        for event in events:
            machine.handle(event)
        return PipelineRun(number, machine, events[0].time, events)

    def cancel(self) -> str:
        """End the last run, whoever drives it; says what was done."""
        run = self.last_run()
        if run.machine.state not in ("running", "asking"):
            return f"run {run.number} is {run.machine.state} already"
        try:
            with self.workspace.locked():
                record = PipelineRecord(self.workspace.record(run.number))
                record.append(RunCancelled(time.time(), who()))
                record.close()
            return f"run {run.number} is cancelled"
        except WorkspaceError:
            self.workspace.order(run.number, "cancel", PersonOrder(who(), cancel=True))
            return f"run {run.number} is told to end"

    def questions(self) -> dict[str, str]:
        """What the last run asks, by task."""
        return {
            name: each.task.step.question
            for name, each in self.last_run().machine.tasks.items()
            if each.state is TaskState.ASKING
        }

    def answer(self, task: str, approved: bool) -> str:
        """Decide what a task asks; says what was done."""
        run = self.last_run()
        asking = self.questions()
        if task not in asking:
            open_ones = ", ".join(asking) or "nothing"
            raise WorkspaceError(
                f"run {run.number} asks nothing called {task} (it asks: {open_ones})"
            )
        name = f"answer-{os.getpid()}-{time.time_ns()}"
        self.workspace.order(run.number, name, PersonOrder(who(), task=task, approved=approved))
        decision = "approved" if approved else "rejected"
        return f"{task} is {decision}: a run that was left goes on with `phalanx pipeline resume`"


def open_pipeline(path: Path) -> PipelineSession:
    """The pipeline of a file; ConfigError with every mistake."""
    return PipelineSession(read_pipeline(path)[1])


def recorded_pipeline(path: Path, number: int = 0) -> PipelineSession:
    """The pipeline as it was when its last run began."""
    workspace = Workspace(read_pipeline(path)[0].place)
    number = number or workspace.last_run()
    events = read_record(workspace.record(number)) if number else []
    if not events or not isinstance(events[0], RunBegan):
        raise WorkspaceError(
            f"{workspace.folder} has no {f'run {number}' if number else 'runs yet'}"
        )
    return PipelineSession(events[0].pipeline, exists=lambda pattern: True)
