"""Runs that a server's core drives: the client that starts and follows them.

The pipeline's folder must be one that this machine and the nodes share.
"""

from __future__ import annotations

import copy
import re
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from phalanx import __version__
from phalanx.cluster.pipeline_runs import KEY_PLACE, ORDER_PLACE, input_place, machine_of
from phalanx.cluster.pipelines.description import read_pipeline
from phalanx.cluster.pipelines.events import AnyEvent, RunBegan, TaskState
from phalanx.cluster.pipelines.graph import Produced, Task
from phalanx.cluster.pipelines.templates import fill_builtin, placeholders
from phalanx.config import ConfigError, check, default_world_size, load_job, resolve
from phalanx.control.client.client import Client, ClientError
from phalanx.control.host.launchers import recognised
from phalanx.control.server.http.submission import RequestedWork, submission
from phalanx.control.wire import api_types as t
from phalanx.pipelines.cluster.step_job import MANIFEST, RANKS, TAKE_OVER
from phalanx.pipelines.run.commands import train_settings
from phalanx.pipelines.run.content import pattern_paths
from phalanx.pipelines.run.manifest import write_raw, write_served_manifest
from phalanx.pipelines.run.session import (
    Changed,
    PipelineRun,
    PipelineSession,
    RunEnd,
)
from phalanx.pipelines.run.training import train_overrides
from phalanx.pipelines.run.workspace import WorkspaceError

STEP_JOB = (sys.executable, "-m", "phalanx.pipelines.cluster.step_job")
DECIDES = ("gate", "best", "approval")  # kinds that need no job, but to read a release
LOOK_SECONDS = 0.5
MOST_NAME = 50  # characters of a job's name
AWAY_SECONDS = 300.0  # that a server may be away while somebody watches
_decode_event = msgspec.json.Decoder(AnyEvent).decode


class ClusterSession:
    """A pipeline whose runs a server drives."""

    def __init__(self, session: PipelineSession, client: Client) -> None:
        self.session, self._client = session, client
        self._folder = str(session.workspace.folder)

    def request(self, parallel: int = 0) -> t.PipelineRequest:
        """The request to the server; ConfigError where it would be refused."""
        planned = self.session.plan(approved=True)
        contents = self.session.hash_inputs()
        node_gpus = self._client.get("/v1/status", t.Status).node_gpus
        table = fill_builtin(copy.deepcopy(self.session.table))
        work = []
        for progress in planned.tasks.values():
            task = progress.task
            decides = task.step.kind in DECIDES and not task.wants_release
            if progress.state is not TaskState.CACHED and not decides:
                work.append(self._jobs(task, node_gpus, table))
        return t.PipelineRequest(
            pipeline=table,
            folder=self._folder,
            inputs=tuple(
                t.RawInput(pattern=pattern, content=each.content)
                for pattern, each in contents.items()
            ),
            results=tuple(
                t.KnownResult(key=each.key, result=each.result)
                for each in planned.tasks.values()
                if each.state is TaskState.CACHED and each.task.step.kind != "approval"
            ),
            work=tuple(work),
            manifest=self._manifest_job(),
            version=__version__,
            parallel=parallel or self.session.file.parallel,
        )

    def begin(self, asked: t.PipelineRequest) -> t.PipelineStarted:
        """Start a run on the server, which needs no client from then on."""
        done = self._client.post("/v1/pipelines", asked, t.PipelineStarted)
        write_raw(self._run_folder(done.pipeline), self.session.hash_inputs())
        return done

    def newest(self) -> int:
        """The last run in this folder; WorkspaceError if the server has none."""
        for run in self._client.get("/v1/pipelines", t.PipelineList).pipelines:
            if run.folder == self._folder:
                return run.id
        raise WorkspaceError(f"the server knows no run of {self._folder}")

    def follow(
        self, number: int, changed: Changed, wait: bool = False, past: bool = True
    ) -> RunEnd:
        """Follow a run until it ends or waits only for a person; survives server restarts.

        ``past``: say also what happened before.
        """
        events = self._new_events(number, 0)
        watched = _WatchedRun(events[0], changed)
        if not past:
            watched.take(events, told=False)
            events = []
        while True:
            watched.take(events)
            state = watched.machine.state
            if state not in ("running", "asking"):
                return RunEnd(
                    number, state, watched.machine, self._manifest(number, watched.events)
                )
            if state == "asking" and not wait:
                return RunEnd(number, state, watched.machine, None)
            time.sleep(LOOK_SECONDS)
            events = self._new_events(number, len(watched.events))

    def _new_events(self, number: int, after: int) -> list[AnyEvent]:
        until = time.monotonic() + AWAY_SECONDS
        while True:
            try:
                path = f"/v1/pipelines/{number}"
                found = self._client.get(path, t.PipelineDetail, after=after).events
                return [_decode_event(each) for each in found]
            except ClientError as error:
                if error.status or time.monotonic() > until:
                    raise
                time.sleep(LOOK_SECONDS)

    def show(self, number: int = 0) -> PipelineRun:
        """A run rebuilt from the server's log; 0: the last in this folder."""
        number = number or self.newest()
        events = self._new_events(number, 0)
        watched = _WatchedRun(events[0], lambda progress: None)
        watched.take(events)
        if watched.machine.state not in ("running", "asking"):
            self._manifest(number, watched.events)
        return PipelineRun(number, watched.machine, watched.events[0].time_ns, watched.events)

    def summary(self, number: int) -> t.PipelineOut:
        """A run in short, with what it cost at the site's price."""
        return self._client.get(f"/v1/pipelines/{number}", t.PipelineDetail, after=1 << 40).run

    def cancel(self, why: str = "") -> str:
        """End the last run in this folder."""
        number = self.newest()
        self._client.post(f"/v1/pipelines/{number}/cancel", t.OrderWhy(why=why), t.Done)
        return f"run {number} is cancelled"

    def questions(self) -> dict[str, str]:
        """Open questions of the last run in this folder, by task."""
        detail = self._client.get(f"/v1/pipelines/{self.newest()}", t.PipelineDetail)
        return {each.name: each.question for each in detail.tasks if each.question}

    def answer(self, task: str, approved: bool, why: str = "") -> str:
        """Answer a task's question."""
        number = self.newest()
        decision = t.TaskDecision(task=task, approve=approved, why=why)
        self._client.post(f"/v1/pipelines/{number}/answer", decision, t.Done)
        return f"{task} is {'approved' if approved else 'rejected'}: run {number} goes on"

    # Files of the run.

    def _run_folder(self, number: int) -> Path:
        return self.session.workspace.runs / f"server-{number:04d}"

    def _manifest(self, number: int, events: list[AnyEvent]) -> Path:
        """The run's manifest; written here if the run's manifest job has not done so yet."""
        run = self._run_folder(number).name
        return write_served_manifest(self.session.workspace, run, events)

    # Jobs.

    def _jobs(self, task: Task, node_gpus: int, table: dict[str, Any]) -> t.TaskJobs:
        step, name = task.step, job_name(self.session.file.name, task.name)
        common = RequestedWork(
            folder=str(Path.cwd()),
            name=name,
            retries=0,  # the pipeline counts them
            minutes=step.timeout_minutes,
            environment={
                key: text for key, text in step.environment.items() if not placeholders(text)
            },
        )
        if step.kind == "train":
            ranks = self._trainer(task, node_gpus, common)
            if node_gpus:  # so that budgets count them
                table["steps"][task.step_name]["gpus"] = ranks.ranks
        elif step.gpus > 1:
            if (found := recognised(step.command)) is not None:
                rule = "starts ranks by itself, but a step with several `gpus` starts once per rank"
                key = f"steps.{task.step_name}.command"
                raise ConfigError(key, found[0], rule, "give the program itself")
            argv = (*STEP_JOB, RANKS, ORDER_PLACE)
            ranks = structs.replace(common, argv=argv, ranks=step.gpus)
        else:
            alone = structs.replace(common, argv=(*STEP_JOB, ORDER_PLACE))
            return t.TaskJobs(task=task.name, step=submission(alone, node_gpus if step.gpus else 0))
        after = structs.replace(common, argv=(*STEP_JOB, TAKE_OVER, ORDER_PLACE))
        return t.TaskJobs(
            task=task.name, step=submission(after, 0), ranks=submission(ranks, node_gpus)
        )

    def _manifest_job(self) -> t.Submission:
        name = f"{self.session.file.name}.{MANIFEST}"
        argv = (*STEP_JOB, MANIFEST, ORDER_PLACE)
        return submission(RequestedWork(folder=str(Path.cwd()), name=name, argv=argv), 0)

    def _trainer(self, task: Task, node_gpus: int, common: RequestedWork) -> RequestedWork:
        """The gang of a train step; paths that are known only at its start are placeholders."""
        step = task.step
        if later := [key for key, text in step.environment.items() if placeholders(text)]:
            key = f"steps.{task.step_name}.environment.{later[0]}"
            rule = "refers to a path known only when the step starts; on a server, a train step"
            fix = "can use such a path in `settings` only"
            raise ConfigError(key, step.environment[later[0]], rule, fix)
        paths: dict[str, list[str]] = {}
        for name, reads in task.reads.items():
            made = [each for each in reads if isinstance(each, Produced)]
            raw = [
                path
                for each in reads
                if not isinstance(each, Produced)
                for path in pattern_paths(each.pattern)
            ]
            paths[f"inputs.{name}"] = [*raw, *([input_place(name)] * len(made))]
        work = self.session.workspace.work / KEY_PLACE
        overrides = train_overrides(work, train_settings(step, paths))
        job = load_job(step.job, overrides)
        ranks = step.gpus or default_world_size(job, node_gpus)
        check(job, ranks)
        return structs.replace(common, job=resolve(job, ranks), ranks=ranks)


def job_name(pipeline: str, task: str) -> str:
    """What a task's jobs are called: values of lists may hold what no such name may."""
    return re.sub(r"[\x00-\x1f\x7f/]", "-", f"{pipeline}.{task}")[:MOST_NAME]


def served_pipeline(path: Path, server: str, *, begin: bool = False) -> ClusterSession:
    """The pipeline of a file, on a server; to begin a run, its raw files must be there."""
    table = read_pipeline(path)[1]
    session = PipelineSession(table) if begin else PipelineSession(table, lambda pattern: True)
    return ClusterSession(session, Client(server))


class _WatchedRun:
    """The machine of a run, fed with its events; says what changed."""

    def __init__(self, first: AnyEvent, changed: Changed) -> None:
        assert isinstance(first, RunBegan)
        self.machine = machine_of(first.pipeline)  # as it was then, whatever the file says now
        self.events: list[AnyEvent] = []
        self._changed = changed
        self._shown = {name: (each.state, 0) for name, each in self.machine.tasks.items()}

    def take(self, events: list[AnyEvent], *, told: bool = True) -> None:
        """Apply new events; ``told``: also describe what they changed."""
        for event in events:
            self.machine.handle(event)
            self.events.append(event)
            for name, progress in self.machine.tasks.items():
                shown = (progress.state, progress.attempts)
                if self._shown[name] != shown:
                    self._shown[name] = shown
                    if told:
                        self._changed(progress)
