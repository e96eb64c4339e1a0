"""The stages of a run whose samples grow longer: which one holds, and what it reads."""

from __future__ import annotations

from bisect import bisect_right

import msgspec

from phalanx.checkpoint import Manifest
from phalanx.config import (
    BatchRamp,
    ConfigError,
    Job,
    Stages,
    batch_ramp,
    changed_rows,
    made_before_change,
    stage_jobs,
    stage_rows,
    virtual_replicas,
)
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


def changed_stages(job: Job, manifest: Manifest) -> tuple[str, ...]:
    """What a run that goes on reads otherwise than its checkpoint's settings say, in words.

    Raises ``ConfigError`` for a stage that has begun and would be another one.
    """
    try:
        before = msgspec.convert(manifest.config, Job)
    except msgspec.ValidationError:
        return ()  # of another version, or of no run
    skips = manifest.cursor.skips
    skipped = [*([(0, skips.forgotten)] if skips.forgotten else []), *skips.ranges]
    made = made_before_change(before, job, skipped)
    if made is None or job.data.allow_other_data:
        return ()
    rows = changed_rows(stage_rows(before, skipped), stage_rows(job, skipped))
    if made < manifest.step:
        samples = Stages.of(before).samples != Stages.of(job).samples
        rule = f"step {made + 1:,} would be another one, and {manifest.step:,} steps are made"
        fix = f"change stages that begin after step {manifest.step:,} or later, or none"
        raise ConfigError("train.sequence_stages" if samples else "data.stages", "", rule, fix)
    return tuple(f"the stages are other ones: {row}" for row in rows)
