"""Where records go: JSON lines, TensorBoard, and optional trackers, each behind one protocol."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from phalanx.config import Job
from phalanx.train.report.event_file import EventFile
from phalanx.train.report.records import (
    CheckpointRecord,
    EvaluationRecord,
    Record,
    StepRecord,
    ValidationRecord,
    encode,
    scalars,
)
from phalanx.train.report.run_folder import RunFolder
from phalanx.train.report.trackers import Mlflow, Tracker, Wandb

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Something that takes records as they are made."""

    def write(self, record: Record) -> None:
        """Take one record; it may be kept back until ``flush``."""

    def flush(self) -> None:
        """Everything written so far becomes visible to readers."""

    def close(self) -> None:
        """No record follows."""


class Sinks:
    """Hands each record to every sink; one that fails is reported and does not end the run."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)
        self.failures: dict[str, str] = {}  # sink: its first error

    def write(self, records: Iterable[Record]) -> None:
        """Hand over records and flush."""
        records = list(records)
        for sink in self._sinks:
            self._guarded(sink, records)

    def fail(self, error: BaseException) -> None:
        """The run ends by this error: trackers show it as failed."""
        for sink in self._sinks:
            if isinstance(sink, Tracker):
                sink.fail(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                self._note(sink, error)
        self._sinks = []

    def _guarded(self, sink: Sink, records: list[Record]) -> None:
        try:
            for record in records:
                sink.write(record)
            sink.flush()
        except Exception as error:  # a tracker may raise anything; training goes on
            self._note(sink, error)

    def _note(self, sink: Sink, error: Exception) -> None:
        name = type(sink).__name__
        if name not in self.failures:
            self.failures[name] = f"{type(error).__name__}: {error}"
            log.warning("%s cannot write (%s); training goes on", name, error)


class JsonLines:
    """``metrics/steps.jsonl``, and a file for each kind of rarer records.

    When a write fails half way, as on a full disk, the part is cut off again, so that every line
    but the last is whole and writing can go on when there is room.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._paths: dict[type[Record], Path] = {
            StepRecord: folder.steps,
            ValidationRecord: folder.validation,
            EvaluationRecord: folder.evaluation,
            CheckpointRecord: folder.metrics / "checkpoints.jsonl",
        }
        self._files: dict[type[Record], int] = {}
        self._waiting: dict[type[Record], bytes] = {}

    def write(self, record: Record) -> None:
        kind = type(record)
        self._waiting[kind] = self._waiting.get(kind, b"") + encode(record)

    def flush(self) -> None:
        for kind, lines in self._waiting.items():
            if lines:
                self._append(kind, lines)
                self._waiting[kind] = b""

    def close(self) -> None:
        try:
            self.flush()
        finally:
            for file in self._files.values():
                os.close(file)
            self._files = {}

    def _append(self, kind: type[Record], lines: bytes) -> None:
        if kind not in self._files:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._files[kind] = os.open(self._paths[kind], flags, 0o644)
        file = self._files[kind]
        whole = os.fstat(file).st_size
        try:
            written = 0
            while written < len(lines):
                written += os.write(file, lines[written:])
        except OSError:
            os.ftruncate(file, whole)
            raise


class TensorBoard:
    """Scalars in ``metrics/tensorboard/``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._events = EventFile(folder)

    def write(self, record: Record) -> None:
        self._events.scalars(record.step, scalars(record))

    def flush(self) -> None:
        self._events.flush()

    def close(self) -> None:
        self._events.close()


def open_sinks(job: Job, folder: RunFolder) -> list[Sink]:
    """The sinks that a job's ``log`` section asks for."""
    sinks: list[Sink] = [JsonLines(folder)]
    if job.log.tensorboard:
        sinks.append(TensorBoard(folder.metrics / "tensorboard"))
    if job.log.wandb:
        sinks.append(Wandb(job, folder))
    if job.log.mlflow:
        sinks.append(Mlflow(job, folder))
    return sinks
