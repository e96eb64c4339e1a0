"""Experiment trackers, each spoken to in a thread of its own.

A tracker is imported, opened and fed beside the training: a slow or silent server costs its own
records and holds up no step.
"""

from __future__ import annotations

import importlib
import importlib.util
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from phalanx.checkpoint.format.folder import latest
from phalanx.config import ConfigError, Job
from phalanx.train.report.records import Record, scalars
from phalanx.train.report.run_folder import RunFolder

CLOSE_SECONDS = 60.0  # how long the end of a run waits for what is not sent yet
WAITING_RECORDS = 10_000  # kept for a tracker that is slow or still opening
MLFLOW_PARAMS, MLFLOW_VALUE = 100, 500  # at once; characters of a value
MLFLOW_BATCH = 1000  # metrics; its server takes no more at once

Send = Callable[[list[Record]], None]


class Tracker(ABC):
    """A sink that hands records to its thread; the thread's trouble is raised here, at a flush."""

    def __init__(self, job: Job, folder: RunFolder) -> None:
        self._job = job
        self._folder = folder
        self._waiting: queue.SimpleQueue[Record | None] = queue.SimpleQueue()  # None: the end
        self._error: Exception | None = None
        self.failure = ""  # why the run ends badly
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    @abstractmethod
    def session(self) -> AbstractContextManager[Send]:
        """Open a run of the tracker; it is given what sends records, and closes after the last."""

    def write(self, record: Record) -> None:
        if self._waiting.qsize() >= WAITING_RECORDS:
            raise BufferError(
                f"{WAITING_RECORDS:,} records wait to be sent: newer ones are left out"
            )
        self._waiting.put(record)

    def fail(self, why: str) -> None:
        """The run has failed, and its tracker is to show that."""
        self.failure = why

    def artifacts(self) -> list[Path]:
        """Folders that were chosen, as far as they are there."""
        newest = latest(self._folder.checkpoints)
        places = {"config": self._folder.config, "metrics": self._folder.metrics}
        found = [
            newest if name == "checkpoint" else places[name] for name in self._job.log.artifacts
        ]
        return [path for path in found if path is not None and path.is_dir()]

    def flush(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._waiting.put(None)
        self.thread.join(CLOSE_SECONDS)
        if self.thread.is_alive():
            raise TimeoutError(f"records were not sent within {CLOSE_SECONDS:.0f} s")
        self.flush()

    def _work(self) -> None:
        try:
            with self.session() as send:
                while records := self._next_records():
                    send(records)
        except Exception as error:  # a tracker may raise anything
            self._error = error

    def _next_records(self) -> list[Record]:
        """All that wait, or the next one; empty at the end."""
        records = []
        while (record := self._waiting.get()) is not None:
            records.append(record)
            if self._waiting.empty():
                return records
        self._waiting.put(None)  # seen again by the next call, when there is nothing before it
        return records


class Wandb(Tracker):
    """A Weights & Biases run."""

    @contextmanager
    def session(self) -> Iterator[Send]:
        wandb: Any = importlib.import_module("wandb")
        run = wandb.init(
            project=self._job.name,
            name=self._folder.id,
            dir=str(self._folder.logs),
            config=msgspec.to_builtins(self._job),
            tags=list(self._job.log.tags),
        )
        # An axis of our own: W&B drops what is logged for a step lower than one it has seen, and
        # a checkpoint is reported before the steps that led to it.
        run.define_metric("*", step_metric="step")

        def send(records: list[Record]) -> None:
            for record in records:
                run.log({"step": record.step} | scalars(record))

        try:
            yield send
            for path in self.artifacts():
                made = wandb.Artifact(f"{self._job.name}-{path.name}", type="run")
                made.add_dir(str(path))
                run.log_artifact(made)
        finally:
            if self.failure:
                run.summary["failure"] = self.failure
            run.finish(exit_code=int(bool(self.failure)))


class Mlflow(Tracker):
    """An MLflow run."""

    @contextmanager
    def session(self) -> Iterator[Send]:
        mlflow: Any = importlib.import_module("mlflow")
        mlflow.set_experiment(self._job.name)
        run = mlflow.start_run(run_name=self._folder.id)
        settings = msgspec.to_builtins(self._job)
        mlflow.log_dict(settings, "job.json")
        params = [(key, str(value)[:MLFLOW_VALUE]) for key, value in leaves(settings)]
        for first in range(0, len(params), MLFLOW_PARAMS):
            mlflow.log_params(dict(params[first : first + MLFLOW_PARAMS]))
        pairs = (tag.partition("=") for tag in self._job.log.tags)
        mlflow.set_tags(
            {"phalanx.run": str(self._folder.path)} | {key: value for key, _, value in pairs}
        )

        def send(records: list[Record]) -> None:
            now = round(time.time() * 1000)
            metrics = [
                mlflow.entities.Metric(name, value, now, record.step)
                for record in records
                for name, value in scalars(record).items()
            ]
            client = mlflow.MlflowClient()
            for first in range(0, len(metrics), MLFLOW_BATCH):
                client.log_batch(run.info.run_id, metrics[first : first + MLFLOW_BATCH])

        try:
            yield send
            for path in self.artifacts():
                mlflow.log_artifacts(str(path), path.name)
        finally:
            if self.failure:
                mlflow.set_tag("phalanx.failure", self.failure[:MLFLOW_VALUE])
            mlflow.end_run("FAILED" if self.failure else "FINISHED")


def leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their dotted keys."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def check_available(job: Job) -> None:
    """Refuse a job that asks for a tracker which is not installed."""
    for name, wanted in (("wandb", job.log.wandb), ("mlflow", job.log.mlflow)):
        if wanted and importlib.util.find_spec(name) is None:
            rule = f"needs the package {name}, which is not installed"
            fix = f"pip install 'phalanx[{name}]', or set it to false"
            raise ConfigError(f"log.{name}", True, rule, fix)
