"""What a reader needs of a corpus, and the one place that opens one."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.config import Data
from phalanx.data.shards import ShardSource
from phalanx.data.synthetic import SyntheticSource


class TokenSource(Protocol):
    """A corpus cut into samples of ``sequence + 1`` tokens, each readable by its index."""

    @property
    def vocab(self) -> int:
        """Number of different tokens that may occur."""

    @property
    def samples(self) -> int:
        """Number of samples, before any are held out."""

    @property
    def fingerprint(self) -> str:
        """Short identity of the content: equal only when every sample is equal."""

    def read(self, index: int) -> NDArray[np.int64]:
        """Tokens of one sample: [sequence + 1]."""

    def documents(self, tokens: NDArray[np.int64]) -> NDArray[np.int32]:
        """Document number of each position, counted from 0 along the last dim."""


def open_source(data: Data, vocab: int) -> TokenSource:
    """Open the corpus that ``data`` names for a model of ``vocab`` tokens."""
    if data.source == "synthetic":
        return SyntheticSource(vocab=vocab, sequence=data.sequence, seed=data.seed)
    return ShardSource(data.path, sequence=data.sequence, vocab=vocab)
