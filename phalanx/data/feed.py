"""Batches for one replica, as a pure function of the cursor.

A step's global batch is the next sample numbers, as many as the batch ramp has for a run that
has read so much. Replicas take equal, contiguous runs of slots from it; slots past its end are
padding that carries no weight, so that any number of replicas makes the same step. Where there are
virtual replicas, the runs are theirs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from phalanx.config import BatchRamp, Data, VirtualReplicas, constant_batch
from phalanx.data.ahead import ReadAhead
from phalanx.data.buffers import StepBuffer, step_buffers
from phalanx.data.corpus.source import SampleSource, Split
from phalanx.data.errors import DataError, DataExhausted
from phalanx.data.order.cursor import Cursor
from phalanx.data.reader import SampleReader

WEIGHTLESS = -100  # label of a position that takes no part in the loss


class Batch(msgspec.Struct, frozen=True):
    """One micro-batch; ``documents`` is None unless ``data.document_mask`` is on."""

    tokens: NDArray[np.int64]  # [micro_batch, sequence]
    labels: NDArray[np.int64]  # [micro_batch, sequence]
    documents: NDArray[np.int32] | None  # [micro_batch, sequence]
    samples: NDArray[np.int64] | None = None  # [micro_batch] numbers in the run, 0 of padding


class StepBatches(msgspec.Struct, frozen=True):
    """What one replica computes in one step; the first two fields are the same on all."""

    step_first_sample: int
    samples: int
    micro_batches: list[Batch]
    real_tokens: int  # labels of this replica that carry weight; of ``data.pairs``, its pairs
    damaged: int = 0  # samples of this replica that carry none because they cannot be read


class _Share(NamedTuple):
    """The slots of one replica in a step of ``batch`` samples."""

    batch: int
    rows: int
    real_rows: int  # the rest is padding
    runs: list[tuple[int, int]]  # first slot and number of those that are real
    cuts: list[slice]  # micro-batches

    @classmethod
    def of(
        cls,
        batch: int,
        micro_batch: int,
        index: int,
        count: int,
        shares: tuple[int, ...] = (),
        padded: bool = True,
        virtual: VirtualReplicas | None = None,
    ) -> _Share:
        """``shares``: micro-batches by replica, where they are unequal and cover the batch."""
        if virtual is not None:
            return cls._of_virtual(batch, micro_batch, virtual)
        if len(shares) != count or sum(shares) * micro_batch < batch:
            shares = (-(-batch // (count * micro_batch)),) * count
        first, own = sum(shares[:index]) * micro_batch, shares[index] * micro_batch
        cuts = [slice(at, at + micro_batch) for at in range(0, own, micro_batch)]
        extra = max(shares) - shares[index] if padded else 0
        # Micro-batches that only keep others company are as small as can be.
        cuts += [slice(at, at + 1) for at in range(own, own + extra)]
        real = min(max(batch - first, 0), own)
        return cls(batch, own + extra, real, [(first, real)], cuts)

    @classmethod
    def _of_virtual(cls, batch: int, micro_batch: int, virtual: VirtualReplicas) -> _Share:
        """Each virtual replica has its own run of slots, whoever computes it."""
        each = virtual.micro_batches(batch, micro_batch) * micro_batch
        rows = each * len(virtual.own)
        firsts = [number * each for number in virtual.own]
        runs = [(first, min(max(batch - first, 0), each)) for first in firsts]
        cuts = [slice(at, at + micro_batch) for at in range(0, rows, micro_batch)]
        return cls(batch, rows, sum(real for _, real in runs), runs, cuts)


class StepReader:
    """Reads the batches of any step, given the cursor before it; keeps no state between steps."""

    def __init__(
        self,
        data: Data,
        reader: SampleReader,
        global_batch: int | BatchRamp,
        micro_batch: int,
        index: int,
        count: int,
        split: Split,
        virtual: VirtualReplicas | None = None,
    ) -> None:
        if isinstance(global_batch, int):
            global_batch = constant_batch(global_batch)
        if not (min(global_batch.batches) > 0 and micro_batch > 0 and 0 <= index < count):
            raise ValueError(f"{global_batch=} {micro_batch=} {index=} {count=}: impossible")
        self._data = data
        self._reader = reader
        self._ramp = global_batch
        self._place = (micro_batch, index, count)
        self._virtual = virtual
        self.rebalance((), padded=True)
        # Validation is measured again and again over the same samples: epochs limit training.
        limited = data.epochs > 0 and split == "train"
        self._limit = reader.draws.limit(data.epochs) if limited else None

    def rebalance(self, shares: tuple[int, ...], *, padded: bool) -> None:
        """Replicas take these numbers of micro-batches; (): equal ones."""
        self._shares = {
            batch: _Share.of(batch, *self._place, shares, padded, self._virtual)
            for batch in self._ramp.batches
        }
        self.most_rows = max(share.rows for share in self._shares.values())

    def advance(self, cursor: Cursor) -> Cursor:
        """The cursor after the step that starts at ``cursor``."""
        past = cursor.past(self._ramp.at(cursor.seen))
        return Cursor(past, cursor.skipped, self._reader.draws.fingerprint(past))

    def step(self, cursor: Cursor, buffer: StepBuffer) -> StepBatches:
        """This replica's batches of the step that starts at ``cursor``."""
        expected = self._reader.draws.fingerprint(cursor.consumed)
        if cursor.fingerprint != expected and not self._data.allow_other_data:
            raise _other_data(cursor.fingerprint, expected)
        if self._limit is not None:
            self._refuse_exhausted(cursor, self._limit)
        share = self._shares[self._ramp.at(cursor.seen)]
        buffer, rows, real = buffer.first(share.rows), share.rows, share.real_rows
        numbers = _upcoming(cursor, share.runs)
        damaged = self._reader.read(numbers, buffer.windows[:real])
        if real < rows:
            buffer.windows[real:] = 0
        buffer.publish()
        silent = self._silent(numbers, damaged, rows)
        documents = self._documents(numbers, buffer.tokens) if self._data.document_mask else None
        weighty = rows * self._data.sequence - (0 if silent is None else int(silent.sum()))
        if self._data.pairs and documents is not None and silent is not None:
            weighty = count_pairs(documents, silent)
        samples = np.zeros(rows, np.int64)
        samples[:real] = numbers
        return StepBatches(
            step_first_sample=cursor.next,
            samples=share.batch,
            micro_batches=self._cut(buffer, share.cuts, documents, silent, samples),
            real_tokens=weighty,
            damaged=len(damaged),
        )

    def _silent(
        self, numbers: range | NDArray[np.int64], damaged: list[int], rows: int
    ) -> NDArray[np.bool_] | None:
        """Labels [rows, sequence] without weight: padding, damage, masks; None where all count."""
        masked, real = self._reader.silent(numbers), len(numbers)
        if masked is None and not damaged and real == rows:
            return None
        silent = np.zeros((rows, self._data.sequence), np.bool_)
        if masked is not None:
            silent[:real] = masked
        silent[real:] = True
        silent[damaged] = True
        return silent

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
        self,
        buffer: StepBuffer,
        cuts: list[slice],
        documents: NDArray[np.int32] | None,
        silent: NDArray[np.bool_] | None,
        samples: NDArray[np.int64],
    ) -> list[Batch]:
        made = []
        for rows in cuts:
            labels = buffer.labels[rows]
            if silent is not None:
                labels = labels.copy() if buffer.shared else labels
                labels[silent[rows]] = WEIGHTLESS
            own = None if documents is None else documents[rows]
            made.append(Batch(buffer.tokens[rows], labels, own, samples[rows]))
        return made

    def _refuse_exhausted(self, cursor: Cursor, limit: int) -> None:
        needed = cursor.past(self._ramp.at(cursor.seen))
        if needed > limit:
            raise DataExhausted(needed, limit, self._data.epochs)


def steps_read_ahead(data: Data) -> int:
    """Steps at the start of a run that wait for no data, however slow it is: they were read before.

    The queue holds ``prefetch`` of them, and one is being read.
    """
    return 0 if data.source == "synthetic" else data.prefetch + 1


def count_pairs(documents: NDArray[np.int32], silent: NDArray[np.bool_]) -> int:
    """Pairs of documents [rows, sequence] that have labels."""
    rows, columns = np.nonzero(~silent)
    pairs = documents[rows, columns] // 2
    return len(np.unique(rows.astype(np.int64) * documents.shape[1] + pairs))


def _upcoming(cursor: Cursor, runs: list[tuple[int, int]]) -> range | NDArray[np.int64]:
    """Sample numbers of runs of slots; only the last ones may be cut short by padding."""
    if len(runs) == 1:
        return cursor.upcoming(*runs[0])
    return np.concatenate([np.asarray(cursor.upcoming(*run), dtype=np.int64) for run in runs])


def _other_data(before: str, now: str) -> DataError:
    """What a cursor's fingerprint says of its data, beside what the settings say."""
    then, here = before.split(), now.split()
    return DataError(
        "cursor.fingerprint",
        " ".join(part for part in then if part not in here) or "(none)",
        "the cursor was made over other data: here it would be "
        + " ".join(part for part in here if part not in then),
        "restore the data settings of that run, start afresh, or go on with other data by "
        "data.allow_other_data = true",
    )


class Feed:
    """``StepReader`` with a thread that reads the following steps ahead; same answers.

    The memory of a step's batches is used again from the third step after it on.
    """

    def __init__(
        self,
        data: Data,
        vocab: int,
        global_batch: int | BatchRamp,
        micro_batch: int,
        index: int,
        count: int,
        split: Split = "train",
        source: SampleSource | None = None,
        pin: bool = False,
        virtual: VirtualReplicas | None = None,
    ) -> None:
        self.reader = SampleReader(data, vocab, split, source)
        self._steps = StepReader(
            data, self.reader, global_batch, micro_batch, index, count, split, virtual
        )
        self._shares: tuple[int, ...] = ()
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

    def rebalance(self, shares: tuple[int, ...], *, padded: bool) -> None:
        """From the next step on, replicas take these numbers of micro-batches; (): equal ones.

        Where they need not be ``padded``, each computes its own number only.
        """
        if shares != self._shares:
            self.close()
            self._shares, self._buffers = shares, None
            self._steps.rebalance(shares, padded=padded)

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
        return step_buffers(self._depth, self._steps.most_rows, self._sequence, self._pin)
