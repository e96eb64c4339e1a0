"""What a step reads, sample by sample: what did the model see at the loss spike?"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from phalanx.config import BatchRamp
from phalanx.data.errors import DataError
from phalanx.data.order.cursor import Cursor
from phalanx.data.reader import SampleReader


class Reading(msgspec.Struct, frozen=True):
    """One sample of a step: who reads it, what it is, and where it lies."""

    replica: int
    micro_batch: int
    row: int  # within the micro-batch
    sample: int  # number within the run
    source: str
    index: int  # sample of the source
    epoch: int  # of the source, from 0
    file: str  # "" for samples that are made up
    token: int  # first one, within the file
    block: int


def step_cursor(step: int, ramp: BatchRamp, known: Cursor | None = None) -> Cursor:
    """Where a run stands before its step number ``step``, counted from 1.

    ``known`` is a later cursor of the run, whose skipped ranges it went on with.
    """
    if step < 1:
        raise ValueError(f"{step=}: steps are counted from 1")
    skipped = (known or Cursor()).skipped
    remembered = Cursor((known or Cursor()).skips.floor, skipped)
    ahead = ramp.samples(step - 1) - remembered.seen
    if ahead < 0:
        rule = "lies before what the checkpoint's cursor remembers of skipped samples"
        raise DataError("step", step, rule, "name an older checkpoint, written soon after it")
    return remembered.advance(ahead)


def step_readings(
    reader: SampleReader, cursor: Cursor, ramp: BatchRamp, micro_batch: int, replicas: int
) -> Iterator[Reading]:
    """All samples of the step that starts at ``cursor``, in the order of replicas and slots."""
    global_batch = ramp.at(cursor.seen)
    numbers = np.asarray(cursor.upcoming(0, global_batch), np.int64)
    which, indices = reader.locate(numbers)
    names, sources = list(reader.sources), list(reader.sources.values())
    rows = -(-global_batch // (replicas * micro_batch)) * micro_batch  # of each replica
    for slot, number in enumerate(numbers.tolist()):
        source, index = which[slot], indices[slot]
        drawn = reader.draws.seen(Cursor(number))[names[source]]  # of the source, before this one
        place = sources[source].place(index)
        replica, inside = divmod(slot, rows)
        yield Reading(
            replica,
            *divmod(inside, micro_batch),
            sample=number,
            source=names[source],
            index=index,
            epoch=drawn // sources[source].samples,
            file=place.file if place else "",
            token=place.token if place else 0,
            block=place.block if place else 0,
        )
