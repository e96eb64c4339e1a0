"""The order for a step's executor, and the report that it returns."""

from __future__ import annotations

import base64

import msgspec
from msgspec import Struct

from phalanx.cluster.pipelines.description import PipelineStep
from phalanx.cluster.pipelines.events import AnyEvent, ReleaseRead, TaskResult, TaskState
from phalanx.cluster.pipelines.graph import Produced
from phalanx.cluster.pipelines.machine import PipelineMachine

RESULT_VARIABLE = "PHALANX_RESULT"  # names the file whose text a program leaves as its result
MOST_ORDER_BYTES = 96 << 10  # as a word of a command line
MOST_RECORD_BYTES = 960 << 10  # as several


class StepInput(Struct, frozen=True, array_like=True):
    """An input of a step."""

    path: str  # in the pipeline's folder; of raw files their pattern
    content: str
    raw: bool = False


class StepOrder(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The order to run a step."""

    pipeline: str
    folder: str  # of the pipeline
    registry: str
    run: str  # its folder's name
    task: str
    key: str = ""
    step: PipelineStep  # with the values of its lists filled in
    inputs: dict[str, tuple[StepInput, ...]] = {}
    job_content: str = ""  # hash of its job file
    states: dict[str, TaskState] = {}  # of all tasks, for a step that tells somebody
    scores: dict[str, dict[str, float]] = {}  # likewise
    release_of: str = ""  # say what the last release of this model scored, and do nothing else


class StepReport(Struct, frozen=True, omit_defaults=True):
    """The report of a completed step."""

    result: TaskResult | None = None
    release: ReleaseRead | None = None


class RecordedRun(Struct, frozen=True):
    """The record of an ended run."""

    folder: str  # of the pipeline
    run: str  # its folder's name
    events: list[AnyEvent]


def step_order(machine: PipelineMachine, name: str, folder: str, run: str) -> StepOrder:
    """Make the order for a task whose inputs are complete."""
    progress, pipeline = machine.tasks[name], machine.pipeline
    task = progress.task
    outputs = machine.inputs(task)
    inputs = {
        each: tuple(
            StepInput(output.path, output.content, not isinstance(source, Produced))
            for source, output in zip(reads, outputs[each], strict=True)
        )
        for each, reads in task.reads.items()
    }
    tells = task.step.kind == "notify"
    tasks = machine.tasks.items() if tells else ()
    return StepOrder(
        pipeline=pipeline.name,
        folder=folder,
        registry=pipeline.registry,
        run=run,
        task=name,
        key=progress.key,
        step=task.step,
        inputs=inputs,
        job_content=machine.raw_inputs.get(task.step.job, ""),
        states={other: each.state for other, each in tasks},
        scores={other: each.result.scores for other, each in tasks if each.result.scores},
    )


def encode_order(order: StepOrder) -> str:
    """Encode an order as one command-line argument."""
    return base64.urlsafe_b64encode(msgspec.json.encode(order)).decode()


def decode_order(text: str) -> StepOrder:
    """Decode an order; ValueError if it is invalid."""
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(text), type=StepOrder)
    except (ValueError, msgspec.MsgspecError) as error:
        raise ValueError(f"{text[:40]!r} is not an order of a step: {error}") from None


def encode_record(record: RecordedRun) -> list[str]:
    """Encode a record as command-line arguments."""
    text = base64.urlsafe_b64encode(msgspec.json.encode(record)).decode()
    return [text[at : at + MOST_ORDER_BYTES] for at in range(0, len(text), MOST_ORDER_BYTES)]


def decode_record(encoded: list[str]) -> RecordedRun:
    """Decode a record; ValueError if it is invalid."""
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode("".join(encoded)), type=RecordedRun)
    except (ValueError, msgspec.MsgspecError) as error:
        raise ValueError(f"this is not a record of a run: {error}") from None
