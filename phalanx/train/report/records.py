"""What a run reports: one record a step, a validation, an evaluation, a checkpoint.

Records are small and self-describing, so that whoever reads them later (a file, an agent, a
page) needs nothing but the record.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

VERSION = 1


class StepWaits(NamedTuple):
    """What a step waited for, and what was written beside it, in seconds."""

    stall: float = 0.0  # that saving held it up
    data: float = 0.0  # that it waited for data
    flush: float = 0.0  # until a checkpoint that is complete now was written


class StepParts(msgspec.Struct, frozen=True, kw_only=True):
    """Where the seconds of a step went, as this rank saw them."""

    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    snapshot: float = 0.0
    verification: float = 0.0  # another rank's micro-batch, computed again
    peer_wait: float | None = None  # for collectives; None: unknown; within the parts above
    own: float | None = None  # the rank's own work: no waits for peers, data, cores; None: unknown
    host: float | None = None  # of its own, that the device did at its host's pace; None: unknown
    launch: float | None = None  # that its host took to give the device its work; None: unknown


class SendTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank sent to single others, and how long that takes when they are ready for it."""

    bytes: int
    seconds: float


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="step"):
    """One optimizer step, or one that was skipped."""

    version: int = VERSION
    job: str
    generation: int
    rank: int
    step: int  # steps completed, this one included
    first_sample: int
    samples: int
    tokens: int  # of the global batch
    tokens_seen: int
    damaged: int = 0  # samples of the global batch that could not be read and carried no weight
    loss: float | None  # None: not finite
    grad_norm: float | None  # None: not finite
    learning_rate: float
    step_seconds: float
    parts: StepParts
    sends: SendTimes | None = None  # None: there were none, or nobody could time them
    estimated: tuple[str, ...] = ()  # parts that were attributed rather than measured
    tokens_per_second: float
    mfu: float | None  # None: see mfu_basis
    hfu: float | None
    mfu_basis: str  # the convention and the peak behind mfu and hfu, or why there is none
    peak_memory_bytes: int
    eta_seconds: float | None
    snapshot_every: int = 0  # steps between snapshots in memory, so many are at risk; 0: none
    skipped: bool
    non_finite: bool


class ValidationRecord(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="validation"
):
    """Loss on held-out samples after a step."""

    version: int = VERSION
    job: str
    generation: int
    step: int
    loss: float | None  # None: not finite
    seconds: float


class EvaluationRecord(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="evaluation"
):
    """Scores of the model after a step, by ``task.metric``."""

    version: int = VERSION
    job: str
    generation: int
    step: int
    scores: dict[str, float]
    problems: dict[str, str] = {}  # by name: why there is no score
    seconds: float


class CheckpointRecord(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="checkpoint"
):
    """A complete checkpoint on disk, or why there is none."""

    version: int = VERSION
    job: str
    generation: int
    step: int
    path: str
    seconds: float  # taken from training
    problem: str = ""  # why it was not saved, though training went on
    interval: str = ""  # when the next one is due, and why


class StartRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="start"):
    """What a run begins with; told once, before its first step."""

    version: int = VERSION
    job: str
    generation: int
    step: int  # that it continues after
    tier: str  # memory, node disks, disk, archive, weights; "": nothing was found
    path: str = ""
    passed_over: tuple[str, ...] = ()  # what would have come first, and what is wrong with it
    changes: tuple[str, ...] = ()  # what goes on otherwise than it was


RareRecord = ValidationRecord | EvaluationRecord | CheckpointRecord  # not of every step
Record = StepRecord | RareRecord | StartRecord
R = TypeVar("R", StepRecord, ValidationRecord, EvaluationRecord, CheckpointRecord)

_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def encode(record: Record) -> bytes:
    """The record as one line of JSON, newline included."""
    return msgspec.json.encode(record) + b"\n"


def decode(line: bytes) -> Record:
    """The record that ``encode`` made into this line."""
    return _decoder.decode(line)


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record under the names that trackers show; what is None is left out."""
    match record:
        case ValidationRecord():
            values: dict[str, float | None] = {"validation/loss": record.loss}
        case EvaluationRecord():
            values = {f"evaluation/{name}": value for name, value in record.scores.items()}
        case StartRecord():
            values = {}
        case CheckpointRecord():
            values = {"checkpoint/seconds": record.seconds}
        case StepRecord():
            values = {
                "train/loss": record.loss,
                "train/grad_norm": record.grad_norm,
                "train/learning_rate": record.learning_rate,
                "train/tokens_seen": record.tokens_seen,
                "train/skipped": float(record.skipped),
                "train/damaged_samples": record.damaged,
                "speed/tokens_per_second": record.tokens_per_second,
                "speed/mfu": record.mfu,
                "speed/hfu": record.hfu,
                "speed/step_seconds": record.step_seconds,
                "memory/peak_bytes": record.peak_memory_bytes,
            }
            parts = msgspec.structs.asdict(record.parts)
            values |= {f"seconds/{name}": seconds for name, seconds in parts.items()}
    return {name: float(value) for name, value in values.items() if value is not None}


def read_records(path: Path, kind: type[R]) -> Iterator[R]:
    """Records of one kind in a JSONL file, oldest first.

    A last line without its newline was being written when the writer died: it is ignored.
    """
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                return
            record = decode(line)
            if isinstance(record, kind):
                yield record
