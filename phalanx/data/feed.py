"""Batches for one replica, as a pure function of the cursor.

A step's global batch is the next ``global_batch`` sample numbers. Replicas take equal,
contiguous runs of slots from it; slots past its end are padding that carries no weight, so
that any number of replicas makes the same step.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from phalanx.config import Data
from phalanx.data.ahead import ReadAhead
from phalanx.data.cursor import Cursor, locate
from phalanx.data.errors import DataError, DataExhausted
from phalanx.data.order import order_key, permute_many
from phalanx.data.source import TokenSource, open_source

Split = Literal["train", "validation"]
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


class StepReader:
    """Reads the batches of any step, given the cursor before it; keeps no state between steps."""

    def __init__(
        self,
        data: Data,
        source: TokenSource,
        global_batch: int,
        micro_batch: int,
        index: int,
        count: int,
        split: Split,
    ) -> None:
        if not (global_batch > 0 and micro_batch > 0 and 0 <= index < count):
            raise ValueError(f"{global_batch=} {micro_batch=} {index=} {count=}: impossible")
        self._data = data
        self._source = source
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        self._split = split
        self._first, self.samples = split_range(data, source.samples, split)
        self._micro_batches = -(-global_batch // (count * micro_batch))
        self._first_slot = index * self._micro_batches * micro_batch
        self.fingerprint = (
            f"order=1 corpus={source.fingerprint} split={split} samples={self.samples} "
            f"seed={data.seed} sequence={data.sequence}"
        )

    def advance(self, cursor: Cursor) -> Cursor:
        """The cursor after the step that starts at ``cursor``."""
        return cursor.advance(self._global_batch)

    def step(self, cursor: Cursor) -> StepBatches:
        """This replica's batches of the step that starts at ``cursor``."""
        self._refuse_other_order(cursor)
        self._refuse_exhausted(cursor)
        slots = self._micro_batches * self._micro_batch
        real = min(max(self._global_batch - self._first_slot, 0), slots)
        tokens = np.zeros((slots, self._data.sequence), np.int64)
        labels = np.full((slots, self._data.sequence), WEIGHTLESS, np.int64)
        for slot, sample in enumerate(self._samples_at(cursor.upcoming(self._first_slot, real))):
            window = self._source.read(sample)
            tokens[slot] = window[:-1]
            labels[slot] = window[1:]
        documents = self._documents(tokens, real) if self._data.document_mask else None
        return StepBatches(
            step_first_sample=int(cursor.upcoming(0, 1)[0]),
            samples=self._global_batch,
            micro_batches=self._cut(tokens, labels, documents),
            real_tokens=real * self._data.sequence,
        )

    def _samples_at(self, numbers: NDArray[np.int64]) -> list[int]:
        """Corpus indices of sample numbers; a step may reach over one or many epoch edges."""
        epochs, positions = locate(numbers, self.samples)
        indices = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            key = order_key(self._data.seed, self._split, int(epoch))
            indices[chosen] = permute_many(positions[chosen], self.samples, key)
        return [int(index) for index in indices + self._first]

    def _documents(self, tokens: NDArray[np.int64], real: int) -> NDArray[np.int32]:
        documents = np.zeros(tokens.shape, np.int32)  # padding stays one document, number 0
        documents[:real] = self._source.documents(tokens[:real])
        return documents

    def _cut(
        self,
        tokens: NDArray[np.int64],
        labels: NDArray[np.int64],
        documents: NDArray[np.int32] | None,
    ) -> list[Batch]:
        rows = [
            slice(at, at + self._micro_batch) for at in range(0, len(tokens), self._micro_batch)
        ]
        return [
            Batch(tokens[row], labels[row], None if documents is None else documents[row])
            for row in rows
        ]

    def _refuse_other_order(self, cursor: Cursor) -> None:
        if cursor.fingerprint == self.fingerprint:
            return
        before, now = cursor.fingerprint.split(), self.fingerprint.split()
        raise DataError(
            "cursor.fingerprint",
            " ".join(part for part in before if part not in now) or "(none)",
            "the cursor was made over other data: here it would be "
            + " ".join(part for part in now if part not in before),
            "restore the data settings of that run, or start afresh",
        )

    def _refuse_exhausted(self, cursor: Cursor) -> None:
        # Validation is measured again and again over the same samples: epochs limit training.
        if self._split == "validation" or self._data.epochs == 0:
            return
        needed = self.advance(cursor).consumed
        available = self._data.epochs * self.samples
        if needed > available:
            raise DataExhausted(needed, available, self._data.epochs)


class Feed:
    """``StepReader`` with a thread that reads the following steps ahead; same answers."""

    def __init__(
        self,
        data: Data,
        vocab: int,
        global_batch: int,
        micro_batch: int,
        index: int,
        count: int,
        split: Split = "train",
        source: TokenSource | None = None,
    ) -> None:
        if source is None:
            source = open_source(data, vocab)
        self._reader = StepReader(data, source, global_batch, micro_batch, index, count, split)
        self._depth = data.prefetch
        self._ahead: ReadAhead[Cursor, StepBatches] | None = None
        self._finalizer: weakref.finalize[[], Feed] | None = None

    @property
    def fingerprint(self) -> str:
        """Identity of corpus, split, seed and sequence length, carried by every cursor."""
        return self._reader.fingerprint

    @property
    def samples(self) -> int:
        """Samples in one epoch of this split."""
        return self._reader.samples

    def start(self) -> Cursor:
        """The cursor of a run that has read nothing."""
        return Cursor(consumed=0, skipped=(), fingerprint=self.fingerprint)

    def advance(self, cursor: Cursor) -> Cursor:
        """The cursor after the step that starts at ``cursor``."""
        return self._reader.advance(cursor)

    def next(self, cursor: Cursor) -> StepBatches:
        """This replica's batches of the step that starts at ``cursor``, whatever came before."""
        if self._depth <= 0:
            return self._reader.step(cursor)
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
        reader = self._reader
        self._ahead = ReadAhead(reader.step, reader.advance, cursor, self._depth)
        # The thread knows the reader but not the feed, so a forgotten feed still ends it.
        self._finalizer = weakref.finalize(self, self._ahead.stop)


def split_range(data: Data, samples: int, split: Split) -> tuple[int, int]:
    """First sample and number of samples of a split: the corpus' end is held out."""
    fraction = data.validation_fraction
    key = "data.validation_fraction"
    if not 0.0 <= fraction < 1.0:
        raise DataError(key, fraction, "must be at least 0 and less than 1", "try 0.01")
    held_out = max(1, int(samples * fraction)) if fraction > 0 else 0
    if split == "validation" and held_out == 0:
        rule = "no samples are held out to validate on"
        raise DataError(key, fraction, rule, "set it to a share such as 0.01")
    if samples - held_out < 1:
        rule = f"the corpus has only {samples} samples of {data.sequence} tokens: none to train on"
        raise DataError(key, fraction, rule, "lower data.sequence, or use a larger corpus")
    if split == "validation":
        return samples - held_out, held_out
    return 0, samples - held_out
