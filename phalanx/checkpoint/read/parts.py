"""Whole tensors of a checkpoint in pieces, to compare them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.checkpoint.read.load import StoredTensors

PART_BYTES = 64 << 20  # of a tensor, compared at a time


def parts(
    stored: StoredTensors, name: str, most_bytes: int = PART_BYTES, copy: int = 0
) -> Iterator[Tensor]:
    """A whole tensor in pieces of rows that fit into little memory; each is proved."""
    shape, dtype = stored.tensors()[name]
    if not shape:
        whole = torch.empty(shape, dtype=dtype)
        stored.fill_rows(name, 0, whole, copy)
        yield whole
        return
    row_bytes = dtype.itemsize * max(1, shape[1:].numel())
    rows = max(1, most_bytes // row_bytes)
    for first in range(0, shape[0], rows):
        part = torch.empty((min(rows, shape[0] - first), *shape[1:]), dtype=dtype)
        stored.fill_rows(name, first, part, copy)
        yield part


def unequal_copies(stored: StoredTensors) -> Iterator[str]:
    """Tensors that several pipeline stages hold (counters) and that are not the same."""
    for name, count in stored.copies().items():
        for copy in range(1, count):
            pairs = zip(parts(stored, name), parts(stored, name, copy=copy), strict=True)
            if not all(torch.equal(bits(a), bits(b)) for a, b in pairs):
                yield f"{name} is held by {count} stages, whose copies are not equal"
                break


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, by which NaN is equal to itself."""
    return (tensor if tensor.dim() else tensor.reshape(1)).view(torch.uint8)
