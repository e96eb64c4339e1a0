"""Batches for one replica, as a pure function of the cursor.

A step's global batch is the next ``global_batch`` sample numbers. Replicas take equal,
contiguous runs of slots from it; slots past its end are padding that carries no weight, so
that any number of replicas makes the same step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.config import Data
from phalanx.data.ahead import ReadAhead
from phalanx.data.buffers import StepBuffer, step_buffers
from phalanx.data.cursor import Cursor
from phalanx.data.errors import DataError, DataExhausted
from phalanx.data.reader import SampleReader
from phalanx.data.source import SampleSource, Split

WEIGHTLESS = -100  # label of a position that takes no part in the loss


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch; ``documents`` is None unless ``data.document_mask`` is on."""

    tokens: NDArray[np.int64]  # [micro_batch, sequence]
    labels: NDArray[np.int64]  # [micro_batch, sequence]
    documents: NDArray[np.int32] | None  # [micro_batch, sequence]


@dataclass(frozen=True, slots=True)
class StepBatches:
    """What one replica computes in one step; the first two fields are the same on all."""

    step_first_sample: int
    samples: int
    micro_batches: list[Batch]
    real_tokens: int  # labels of this replica that carry weight
    damaged: int = 0  # samples of this replica that carry none because they cannot be read


class StepReader:
    """Reads the batches of any step, given the cursor before it; keeps no state between steps."""

    def __init__(
        self,
        data: Data,
        reader: SampleReader,
        global_batch: int,
        micro_batch: int,
        index: int,
        count: int,
        split: Split,
    ) -> None:
        if not (global_batch > 0 and micro_batch > 0 and 0 <= index < count):
            raise ValueError(f"{global_batch=} {micro_batch=} {index=} {count=}: impossible")
        self._data = data
        self._reader = reader
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        self._micro_batches = -(-global_batch // (count * micro_batch))
        self.rows = self._micro_batches * micro_batch
        self._first_slot = index * self.rows
        self._real_rows = min(max(global_batch - self._first_slot, 0), self.rows)
        # Validation is measured again and again over the same samples: epochs limit training.
        limited = data.epochs > 0 and split == "train"
        self._limit = reader.draws.limit(data.epochs) if limited else None

    def advance(self, cursor: Cursor) -> Cursor:
        """The cursor after the step that starts at ``cursor``."""
        after = cursor.advance(self._global_batch)
        fingerprint = self._reader.draws.fingerprint(after.consumed)
        if fingerprint == after.fingerprint:
            return after
        return Cursor(after.consumed, after.skipped, fingerprint)

    def step(self, cursor: Cursor, buffer: StepBuffer) -> StepBatches:
        """This replica's batches of the step that starts at ``cursor``."""
        self._refuse_other_order(cursor)
        self._refuse_exhausted(cursor)
        windows, real = buffer.windows, self._real_rows
        numbers = cursor.upcoming(self._first_slot, real)
        damaged = self._reader.read(numbers, windows[:real])
        windows[real:] = 0
        buffer.publish()
        weightless = [*damaged, *range(real, self.rows)]
        documents = self._documents(numbers, buffer.tokens) if self._data.document_mask else None
        return StepBatches(
            step_first_sample=int(cursor.upcoming(0, 1)[0]),
            samples=self._global_batch,
            micro_batches=self._cut(buffer, documents, weightless),
            real_tokens=(real - len(damaged)) * self._data.sequence,
            damaged=len(damaged),
        )

    def _documents(
        self, numbers: range | NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> NDArray[np.int32]:
        documents = np.zeros(tokens.shape, np.int32)  # padding stays one document, number 0
        which, indices = (np.array(part) for part in self._reader.locate(numbers))
        for source, content in enumerate(self._reader.sources.values()):
            rows = np.flatnonzero(which == source)
            if len(rows):
                documents[rows] = content.documents(indices[rows].tolist(), tokens[rows])
        return documents

    def _cut(
        self, buffer: StepBuffer, documents: NDArray[np.int32] | None, weightless: list[int]
    ) -> list[Batch]:
        made = []
        for first in range(0, self.rows, self._micro_batch):
            rows = slice(first, first + self._micro_batch)
            labels = buffer.labels[rows]
            silent = [row - first for row in weightless if first <= row < rows.stop]
            if silent:
                labels = labels.copy()  # tokens may live in the same memory
                labels[silent] = WEIGHTLESS
            made.append(
                Batch(buffer.tokens[rows], labels, None if documents is None else documents[rows])
            )
        return made

    def _refuse_other_order(self, cursor: Cursor) -> None:
        expected = self._reader.draws.fingerprint(cursor.consumed)
        if cursor.fingerprint == expected or self._data.allow_other_data:
            return
        before, now = cursor.fingerprint.split(), expected.split()
        raise DataError(
            "cursor.fingerprint",
            " ".join(part for part in before if part not in now) or "(none)",
            "the cursor was made over other data: here it would be "
            + " ".join(part for part in now if part not in before),
            "restore the data settings of that run, start afresh, or go on with other data by "
            "data.allow_other_data = true",
        )

    def _refuse_exhausted(self, cursor: Cursor) -> None:
        if self._limit is None:
            return
        needed = cursor.advance(self._global_batch).consumed
        if needed > self._limit:
            raise DataExhausted(needed, self._limit, self._data.epochs)


class Feed:
    """``StepReader`` with a thread that reads the following steps ahead; same answers.

    The memory of a step's batches is used again from the third step after it on.
    """

    def __init__(
        self,
        data: Data,
        vocab: int,
        global_batch: int,
        micro_batch: int,
        index: int,
        count: int,
        split: Split = "train",
        source: SampleSource | None = None,
        pin: bool = False,
    ) -> None:
        self.reader = SampleReader(data, vocab, split, source)
        self._steps = StepReader(data, self.reader, global_batch, micro_batch, index, count, split)
        self._depth = data.prefetch
        self._sequence = data.sequence
        self._pin = pin
        self._buffers: Iterator[StepBuffer] | None = None
        self._ahead: ReadAhead[Cursor, StepBatches] | None = None
        self._finalizer: weakref.finalize[[], Feed] | None = None

    @property
    def samples(self) -> int:
        """Samples in one epoch of this split, over all sources."""
        return self.reader.samples

    def start(self) -> Cursor:
        """The cursor of a run that has read nothing."""
        return Cursor(0, (), self.reader.draws.fingerprint(0))

    def advance(self, cursor: Cursor) -> Cursor:
        """The cursor after the step that starts at ``cursor``."""
        return self._steps.advance(cursor)

    def seen(self, cursor: Cursor) -> dict[str, int]:
        """Samples of each source that a run at ``cursor`` has read."""
        return self.reader.draws.seen(cursor)

    def next(self, cursor: Cursor) -> StepBatches:
        """This replica's batches of the step that starts at ``cursor``, whatever came before."""
        if self._depth <= 0:
            self._buffers = self._buffers or self._make_buffers()
            return self._steps.step(cursor, next(self._buffers))
        if self._ahead is None or not self._ahead.alive or self._ahead.upcoming != cursor:
            self._follow(cursor)
        assert self._ahead is not None
        return self._ahead.take()

    def close(self) -> None:
        """End the reading thread; the feed may be used again and starts a new one."""
        if self._finalizer is not None:
            self._finalizer()
        self._ahead = None

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _follow(self, cursor: Cursor) -> None:
        # Started on first use, not before: the process may fork between making and using a feed.
        self.close()
        steps, buffers = self._steps, self._make_buffers()
        self._ahead = ReadAhead(
            lambda at: steps.step(at, next(buffers)), steps.advance, cursor, self._depth
        )
        # The thread knows the reader but not the feed, so a forgotten feed still ends it.
        self._finalizer = weakref.finalize(self, self._ahead.stop)

    def _make_buffers(self) -> Iterator[StepBuffer]:
        # New ones whenever the order of steps is left: batches handed out stay as they are.
        return step_buffers(self._depth, self._steps.rows, self._sequence, self._pin)
