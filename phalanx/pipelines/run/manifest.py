"""The manifest of a run: from every raw file to every output, what made it and what it holds."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx.data.durable_files import write_atomically
from phalanx.pipelines.events import AnyEvent, Output, RunBegan, TaskState
from phalanx.pipelines.graph import Produced
from phalanx.pipelines.machine import PipelineMachine, RunState, TaskProgress
from phalanx.pipelines.run.content import RawContent

MANIFEST_FILE = "manifest.json"
RAW_FILE = "inputs.json"


class TaskInput(Struct, frozen=True):
    """Something that a task read."""

    source: str  # TASK.OUTPUT, or a path or pattern of raw files
    content: str


class ManifestTask(Struct, frozen=True, omit_defaults=True):
    """What a task read, ran and made."""

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
    """A run that has ended."""

    pipeline: str
    state: RunState
    began: float
    ended: float
    phalanx: str
    raw: dict[str, RawContent]  # by pattern: every file with its hash
    tasks: dict[str, ManifestTask]


def write_manifest(folder: Path, machine: PipelineMachine, events: list[AnyEvent]) -> None:
    """Write what a run did into its folder."""
    began = events[0]
    assert isinstance(began, RunBegan)
    raw = msgspec.json.decode((folder / RAW_FILE).read_bytes(), type=dict[str, RawContent])
    manifest = PipelineManifest(
        pipeline=machine.pipeline.name,
        state=machine.state,
        began=began.time,
        ended=events[-1].time,
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
        seconds=round(progress.seconds, 3),
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
