"""Small corpora and reference readers that several tests share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.config import Data
from phalanx.data import Batch, Cursor, Feed, ShardWriter, StepBatches


class CountingSource:
    """A corpus in which every token of sample i is i, so that a batch shows what it read."""

    vocab = 1 << 30
    fingerprint = "counting"

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def read(self, indices: Sequence[int], rows: Iterable[NDArray[np.int64]]) -> None:
        for index, row in zip(indices, rows, strict=True):
            assert 0 <= index < self.samples
            row[:] = index

    def documents(self, indices: Sequence[int], tokens: NDArray[np.int64]) -> NDArray[np.int32]:
        return np.zeros(tokens.shape, np.int32)

    def silent(self, indices: Sequence[int]) -> None:
        return None

    def place(self, index: int) -> None:
        return None

    def expect(self, indices: NDArray[np.int64]) -> None:
        pass


def counting_feed(
    samples: int,
    global_batch: int,
    micro_batch: int = 1,
    index: int = 0,
    count: int = 1,
    **data: object,
) -> Feed:
    """A feed over ``CountingSource``; ``prefetch`` is off unless asked for."""
    settings = Data(**{"sequence": 2, "prefetch": 0, "source": "synthetic", **data})  # type: ignore[arg-type]
    source = CountingSource(samples)
    return Feed(settings, source.vocab, global_batch, micro_batch, index, count, source=source)


def real_samples(step: StepBatches) -> list[int]:
    """Corpus indices a replica read in a step, padding left out, from a counting feed."""
    return [
        int(row[0])
        for batch in step.micro_batches
        for row, labels in zip(batch.tokens, batch.labels, strict=True)
        if (labels != -100).all()
    ]


def stream(feed: Feed, cursor: Cursor, steps: int) -> list[list[int]]:
    """Samples of consecutive steps from ``cursor`` on."""
    given = []
    for _ in range(steps):
        given.append(real_samples(feed.next(cursor)))
        cursor = feed.advance(cursor)
    return given


def write_corpus(
    folder: Path, tokens: int, vocab: int = 1000, documents: int = 3, file_bytes: int = 1 << 20
) -> NDArray[np.int64]:
    """Random shards whose documents end with token 0; returns the whole stream of tokens."""
    content = np.random.default_rng(0).integers(1, vocab, tokens - documents)
    with ShardWriter(folder, vocab, end_of_document=0, file_bytes=file_bytes) as writer:
        pieces = np.array_split(content, documents)
        for piece in pieces:
            writer.write(piece)
            writer.end_document()
        writer.finish()
    return np.concatenate([np.append(piece, 0) for piece in pieces])


def same_batches(left: list[Batch], right: list[Batch]) -> bool:
    """Whether two lists of micro-batches are equal to the last number."""

    def same(a: NDArray[np.generic] | None, b: NDArray[np.generic] | None) -> bool:
        return (a is None and b is None) or (
            a is not None and b is not None and a.dtype == b.dtype and bool(np.array_equal(a, b))
        )

    return len(left) == len(right) and all(
        same(a.tokens, b.tokens) and same(a.labels, b.labels) and same(a.documents, b.documents)
        for a, b in zip(left, right, strict=True)
    )
