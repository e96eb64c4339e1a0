"""The stages of a run whose samples grow longer: which one holds, and what it reads."""

from __future__ import annotations

from bisect import bisect_right

from phalanx.config import BatchRamp, Job, batch_ramp, stage_jobs, virtual_replicas
from phalanx.data import Cursor, Feed, Split, StagedFeed

TrainFeed = Feed | StagedFeed


class RunStages:
    """Made of a resolved job, for one of its replicas. Most runs have one stage: the job."""

    def __init__(self, job: Job, data_index: int, *, pin: bool) -> None:
        self._stages = stage_jobs(job)
        self._firsts = [stage.first for stage in self._stages]
        self._ramp = batch_ramp(job)
        self._data_index, self._pin = data_index, pin

    def at(self, cursor: Cursor) -> Job:
        """The stage that the next step belongs to, as a job."""
        return self._of(cursor.seen)

    def before(self, cursor: Cursor) -> Job:
        """The stage that the last step belonged to; of a run without steps, its first."""
        return self._of(max(0, cursor.seen - 1))

    def _of(self, sample: int) -> Job:
        return self._stages[bisect_right(self._firsts, sample) - 1].job

    def train_feed(self) -> TrainFeed:
        """All steps of the run."""
        if len(self._stages) == 1:
            return self._open(0)
        return StagedFeed(self._firsts, self._open)

    def refuse_without_validation(self) -> None:
        """Raise ``DataError`` where what is held out has no sample of some stage's length."""
        for stage in self._stages:
            self.open_feed(stage.job, "validation", 1).close()

    def _open(self, number: int) -> Feed:
        return self.open_feed(self._stages[number].job, "train", self._ramp)

    def open_feed(self, stage: Job, split: Split, batch: int | BatchRamp) -> Feed:
        """Samples of one stage."""
        return Feed(
            stage.data,
            stage.model.vocab,
            batch,
            stage.train.micro_batch,
            self._data_index,
            stage.parallel.data,
            split,
            pin=self._pin,
            virtual=virtual_replicas(stage, self._data_index),
        )
