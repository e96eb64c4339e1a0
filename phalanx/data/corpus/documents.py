"""Document boundaries inside packed sequences."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def number_documents(tokens: NDArray[np.int64], end_of_document: int) -> NDArray[np.int32]:
    """Document number per position, from 0; an end token belongs to the document it ends."""
    ended = np.zeros(tokens.shape, np.int32)
    np.cumsum(tokens[..., :-1] == end_of_document, axis=-1, dtype=np.int32, out=ended[..., 1:])
    return ended
