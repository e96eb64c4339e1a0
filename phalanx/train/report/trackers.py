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
from typing import Any

import msgspec

from phalanx.config import ConfigError, Job
from phalanx.train.report.records import Record, scalars
from phalanx.train.report.run_folder import RunFolder

CLOSE_SECONDS = 60.0  # how long the end of a run waits for what is not sent yet
WAITING_RECORDS = 10_000  # kept for a tracker that is slow or still opening
MLFLOW_BATCH = 1000  # metrics; its server takes no more at once

Send = Callable[[list[Record]], None]


class Tracker(ABC):
    """A sink that hands records to its thread; the thread's trouble is raised here, at a flush."""

    def __init__(self, job: Job, folder: RunFolder) -> None:
        self._job = job
        self._folder = folder
        self._waiting: queue.SimpleQueue[Record | None] = queue.SimpleQueue()  # None: the end
        self._error: Exception | None = None
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
        )
        # An axis of our own: W&B drops what is logged for a step lower than one it has seen, and
        # a checkpoint is reported before the steps that led to it.
        run.define_metric("*", step_metric="step")

        def send(records: list[Record]) -> None:
            for record in records:
                run.log({"step": record.step} | scalars(record))

        try:
            yield send
        finally:
            run.finish()


class Mlflow(Tracker):
    """An MLflow run."""

    @contextmanager
    def session(self) -> Iterator[Send]:
        mlflow: Any = importlib.import_module("mlflow")
        mlflow.set_experiment(self._job.name)
        run = mlflow.start_run(run_name=self._folder.id)
        mlflow.log_dict(msgspec.to_builtins(self._job), "job.json")

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
        finally:
            mlflow.end_run()


def check_available(job: Job) -> None:
    """Refuse a job that asks for a tracker which is not installed."""
    for name, wanted in (("wandb", job.log.wandb), ("mlflow", job.log.mlflow)):
        if wanted and importlib.util.find_spec(name) is None:
            rule = f"needs the package {name}, which is not installed"
            fix = f"pip install 'phalanx[{name}]', or set it to false"
            raise ConfigError(f"log.{name}", True, rule, fix)
