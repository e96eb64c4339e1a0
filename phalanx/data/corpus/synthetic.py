"""Random tokens as a pure function of (seed, index): a corpus without files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.data.corpus.stream import TokenPosition, number_documents
from phalanx.data.errors import DataError

SAMPLES = 1 << 40  # more than any run reads, and cheap to permute
END_OF_DOCUMENT = 0  # this token ends a "document", so that document masks can be exercised

_WORD = (1 << 64) - 1


class SyntheticSource:
    """Uniform random tokens; the same sample for the same seed on every machine."""

    def __init__(self, vocab: int, sequence: int, seed: int) -> None:
        if not 0 < vocab <= 1 << 32:
            raise DataError("model.vocab", vocab, "must be between 1 and 2^32", "set model.vocab")
        self.vocab = vocab
        self.samples = SAMPLES
        self.fingerprint = f"synthetic-{vocab}"  # the reader adds seed and sequence
        self.sequence = sequence
        self._seed = seed & _WORD

    def read(self, indices: Sequence[int], rows: Iterable[NDArray[np.int64]]) -> None:
        """Fill each row with the tokens of a sample: [sequence + 1]."""
        # Raw Philox words are fixed by its definition; Generator's methods may change with numpy.
        for index, row in zip(indices, rows, strict=True):
            philox = np.random.Philox(key=np.array([self._seed, index], np.uint64))
            words = philox.random_raw(self.sequence + 1) >> np.uint64(32)
            row[:] = (words * np.uint64(self.vocab)) >> np.uint64(32)

    def documents(self, indices: Sequence[int], tokens: NDArray[np.int64]) -> NDArray[np.int32]:
        """Document number of each position, from 0 in each sample; tokens: [samples, sequence]."""
        return number_documents(tokens, END_OF_DOCUMENT)

    def silent(self, indices: Sequence[int]) -> None:
        """Every generated token counts."""

    def place(self, index: int) -> TokenPosition | None:
        """Generated samples lie nowhere."""
        return None

    def expect(self, indices: NDArray[np.int64]) -> None:
        """Generated samples need no preparation."""
