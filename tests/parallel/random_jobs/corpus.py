"""Samples with documents of any length, and with labels that carry no weight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.config import Data
from phalanx.data.own_corpus import OwnCorpus

SAMPLES = 512
QUIET = 4  # of so many samples one has no label at all


class UnevenCorpus(OwnCorpus):
    """A function of the seed, the length of samples and their index."""

    def __init__(self, data: Data, vocab: int) -> None:
        super().__init__(data, vocab)
        self.samples, self.fingerprint = SAMPLES, f"uneven-{vocab}-{data.sequence}"

    def _chance(self, index: int, what: int) -> np.random.Generator:
        return np.random.default_rng([self.data.seed, self.data.sequence, index, what])

    def sample(self, index: int) -> NDArray[np.int64]:
        """Few tokens are likely, so that there is something to learn."""
        draws = self._chance(index, 0).random(self.data.sequence + 1)
        return (draws**3 * self.vocab).astype(np.int64)

    def documents(self, indices: Sequence[int], tokens: NDArray[np.int64]) -> NDArray[np.int32]:
        """Borders anywhere; some samples are one document, some have one of a single token."""
        found = np.zeros(tokens.shape, np.int32)
        for row, index in zip(found, indices, strict=True):
            chance = self._chance(index, 1)
            borders = chance.random(len(row)) < chance.choice([0.0, 0.1, 0.5])
            row[:] = np.cumsum(borders)
        return found

    def silent(self, indices: Sequence[int]) -> NDArray[np.bool_]:
        """A few labels here, most of them there, all of them elsewhere."""
        found = np.zeros((len(indices), self.data.sequence), np.bool_)
        for row, index in zip(found, indices, strict=True):
            chance = self._chance(index, 2)
            share = 1.0 if chance.integers(QUIET) == 0 else chance.choice([0.0, 0.3, 0.9])
            row[:] = chance.random(len(row)) < share
        return found
