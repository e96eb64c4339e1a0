"""CRC-32C: the checksum that processors compute in hardware and object stores know."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def crc32c(data: bytes | memoryview, value: int = 0) -> int:
    """Checksum of ``data``, continuing from ``value``."""
    from crc32c import crc32c as compute  # loaded only where checksums are made or compared

    return int(compute(data, value))


class BlockSums:
    """Checksums of consecutive blocks of a file that arrives in pieces of any size."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._open = 0  # checksum of the block that is not full yet
        self._left = block_bytes
        self._sums: list[int] = []

    def add(self, data: NDArray[np.uint8]) -> None:
        """Take the next bytes of the file."""
        while len(data):
            piece, data = data[: self._left], data[self._left :]
            self._open = crc32c(piece.data, self._open)
            self._left -= len(piece)
            if self._left == 0:
                self._sums.append(self._open)
                self._open, self._left = 0, self._block_bytes

    def finish(self) -> NDArray[np.uint32]:
        """Checksums of all blocks, the last of which may be short."""
        tail = [self._open] if self._left < self._block_bytes else []
        return np.array([*self._sums, *tail], "<u4")
