"""The manifest of a run: from every raw file to every output, what made it and what it holds."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx.cluster.pipeline_runs import machine_of
from phalanx.cluster.pipelines.events import AnyEvent, Output, RunBegan, TaskState
from phalanx.cluster.pipelines.graph import Produced
from phalanx.cluster.pipelines.machine import PipelineMachine, RunState, TaskProgress
from phalanx.cluster.units import SECOND_NS
from phalanx.data.durable_files import write_atomically
from phalanx.pipelines.run.content import ContentCache, RawContent
from phalanx.pipelines.run.workspace import Workspace

MANIFEST_FILE = "manifest.json"
RAW_FILE = "inputs.json"


class TaskInput(Struct, frozen=True):
    """An input of a task."""

    source: str  # TASK.OUTPUT, or a path or pattern of raw files
    content: str


class ManifestTask(Struct, frozen=True, omit_defaults=True):
    """A task's inputs, command and outputs."""

    state: TaskState
    reason: str = ""
    kind: str = ""
    key: str = ""
    command: tuple[str, ...] = ()
    job: str = ""
    settings: dict[str, object] = {}
    inputs: dict[str, list[TaskInput]] = {}
    outputs: dict[str, Output] = {}
    scores: dict[str, float] = {}
    attempts: int = 0
    seconds: float = 0.0


class PipelineManifest(Struct, frozen=True):
    """The manifest of an ended run."""

    pipeline: str
    state: RunState
    began: float
    ended: float
    phalanx: str
    raw: dict[str, RawContent]  # by pattern: every file with its hash
    tasks: dict[str, ManifestTask]


def write_raw(folder: Path, contents: dict[str, RawContent]) -> None:
    """Store every raw file's hash at the start of a run, for its manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RAW_FILE, msgspec.json.encode(contents))


def write_served_manifest(workspace: Workspace, run: str, events: list[AnyEvent]) -> Path:
    """Write the manifest of a run on a server unless it exists; return its path."""
    folder, began = workspace.runs / run, events[0]
    assert isinstance(began, RunBegan)
    if not (folder / RAW_FILE).exists():  # whoever began it was lost before it was written
        cache = ContentCache(workspace.hashes)
        now = {pattern: cache.of_pattern(pattern) for pattern in began.inputs}
        same = {name: each for name, each in now.items() if each.content == began.inputs[name]}
        write_raw(folder, same)
    if not (folder / MANIFEST_FILE).exists():
        machine = machine_of(began.pipeline)
        for event in events:
            machine.handle(event)
        write_manifest(folder, machine, events)
    return folder / MANIFEST_FILE


def write_manifest(folder: Path, machine: PipelineMachine, events: list[AnyEvent]) -> None:
    """Write the manifest of a run into its folder."""
    began = events[0]
    assert isinstance(began, RunBegan)
    raw = msgspec.json.decode((folder / RAW_FILE).read_bytes(), type=dict[str, RawContent])
    manifest = PipelineManifest(
        pipeline=machine.pipeline.name,
        state=machine.state,
        began=began.time_ns / SECOND_NS,
        ended=events[-1].time_ns / SECOND_NS,
        phalanx=began.version,
        raw=raw,
        tasks={name: _task(machine, each) for name, each in machine.tasks.items()},
    )
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
    write_atomically(folder / MANIFEST_FILE, text)


def _task(machine: PipelineMachine, progress: TaskProgress) -> ManifestTask:
    task = progress.task
    return ManifestTask(
        state=progress.state,
        reason=progress.reason,
        kind=task.step.kind,
        key=progress.key,
        command=task.step.command,
        job=task.step.job,
        settings=dict(task.step.settings),
        inputs=_inputs(machine, progress) if progress.key else {},
        outputs=progress.result.outputs,
        scores=progress.result.scores,
        attempts=progress.attempts,
        seconds=round(progress.took_ns / SECOND_NS, 3),
    )


def _inputs(machine: PipelineMachine, progress: TaskProgress) -> dict[str, list[TaskInput]]:
    outputs = machine.inputs(progress.task)
    return {
        name: [
            TaskInput(
                f"{each.task}.{each.output}" if isinstance(each, Produced) else each.pattern,
                output.content,
            )
            for each, output in zip(reads, outputs[name], strict=True)
        ]
        for name, reads in progress.task.reads.items()
    }
