"""Where records go: JSON lines, TensorBoard, and optional trackers, each behind one protocol."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from phalanx.config import ConfigError, Job
from phalanx.train.event_file import EventFile
from phalanx.train.records import CheckpointRecord, Record, StepRecord, ValidationRecord, encode
from phalanx.train.run_folder import RunFolder

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
    """``metrics/steps.jsonl``, ``validation.jsonl`` and ``checkpoints.jsonl``.

    When a write fails half way, as on a full disk, the part is cut off again, so that every line
    but the last is whole and writing can go on when there is room.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._paths: dict[type[Record], Path] = {
            StepRecord: folder.steps,
            ValidationRecord: folder.validation,
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


class Wandb:
    """A Weights & Biases run."""

    def __init__(self, job: Job, folder: RunFolder) -> None:
        wandb: Any = importlib.import_module("wandb")
        config = msgspec.to_builtins(job)
        self._run = wandb.init(
            project=job.name, name=folder.id, dir=str(folder.logs), config=config
        )

    def write(self, record: Record) -> None:
        self._run.log(scalars(record), step=record.step)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """An MLflow run."""

    def __init__(self, job: Job, folder: RunFolder) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        self._mlflow.set_experiment(job.name)
        self._mlflow.start_run(run_name=folder.id)
        self._mlflow.log_dict(msgspec.to_builtins(job), "job.json")

    def write(self, record: Record) -> None:
        self._mlflow.log_metrics(scalars(record), step=record.step)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._mlflow.end_run()


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record under the names that trackers show; what is None is left out."""
    match record:
        case ValidationRecord():
            found: dict[str, float | None] = {"validation/loss": record.loss}
        case CheckpointRecord():
            found = {"checkpoint/seconds": record.seconds}
        case StepRecord():
            found = {
                "train/loss": record.loss,
                "train/grad_norm": record.grad_norm,
                "train/learning_rate": record.learning_rate,
                "train/tokens_seen": record.tokens_seen,
                "train/skipped": float(record.skipped),
                "speed/tokens_per_second": record.tokens_per_second,
                "speed/mfu": record.mfu,
                "speed/hfu": record.hfu,
                "speed/step_seconds": record.step_seconds,
                "memory/peak_bytes": record.peak_memory_bytes,
            }
            parts = msgspec.structs.asdict(record.parts)
            found |= {f"seconds/{name}": seconds for name, seconds in parts.items()}
    return {name: float(value) for name, value in found.items() if value is not None}


def check_available(job: Job) -> None:
    """Refuse a job that asks for a tracker which is not installed."""
    for name, wanted in (("wandb", job.log.wandb), ("mlflow", job.log.mlflow)):
        if wanted and importlib.util.find_spec(name) is None:
            rule = f"needs the package {name}, which is not installed"
            raise ConfigError(f"log.{name}", True, rule, f"pip install {name}, or set it to false")


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
