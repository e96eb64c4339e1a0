"""A corpus of one's own: samples that a job's Python makes, in place of token shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.config import Data
from phalanx.data.errors import DataError


class OwnCorpus:
    """Samples by their index; derive from it and name the class in ``data.module``.

    Set ``samples`` and ``fingerprint`` in the constructor. A sample must depend on its index
    alone, so that every mesh, and every start, reads the same one.
    """

    samples: int  # how many there are
    fingerprint: str  # short identity of the content: equal only when every sample is equal

    def __init__(self, data: Data, vocab: int) -> None:
        self.data, self.vocab = data, vocab

    def sample(self, index: int) -> NDArray[np.int64]:
        """The tokens of a sample: [data.sequence + 1], of which the first has no label."""
        raise NotImplementedError

    def read(self, indices: Sequence[int], rows: Iterable[NDArray[np.int64]]) -> None:
        """Fill each row with the tokens of a sample."""
        for index, row in zip(indices, rows, strict=True):
            tokens = np.asarray(self.sample(index))
            if tokens.shape != row.shape or tokens.min() < 0 or tokens.max() >= self.vocab:
                rule = f"sample {index} must be {len(row)} tokens from 0 to {self.vocab - 1}"
                fix = f"correct {type(self).__name__}.sample"
                raise DataError("data.module", f'"{self.data.module}"', rule, fix)
            row[:] = tokens

    def documents(self, indices: Sequence[int], tokens: NDArray[np.int64]) -> NDArray[np.int32]:
        """Each sample is one document, unless a subclass says otherwise."""
        return np.zeros(tokens.shape, np.int32)

    def silent(self, indices: Sequence[int]) -> NDArray[np.bool_] | None:
        """Labels [samples, sequence] without weight; None: all have one."""
        return None

    def place(self, index: int) -> None:
        """Nowhere on disk."""

    def expect(self, indices: NDArray[np.int64]) -> None:
        """Samples that will be read soon."""
