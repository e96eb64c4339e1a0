"""Memory that batches are read into, used again and again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

# Of the steps already handed out, those whose memory must not be touched yet: the one being
# computed, and the one before it, whose copy to the device may still be under way.
HELD_STEPS = 2


@dataclass(frozen=True, slots=True)
class StepBuffer:
    """Room for one step; tokens and labels are what is handed out."""

    windows: NDArray[np.int64]  # [rows, sequence + 1]
    tokens: NDArray[np.int64]  # [rows, sequence]
    labels: NDArray[np.int64]  # [rows, sequence]
    shared: bool  # the two are views of the windows

    def first(self, rows: int) -> StepBuffer:
        """The beginning of the buffer, for a step of fewer rows."""
        if rows == len(self.windows):
            return self
        return StepBuffer(self.windows[:rows], self.tokens[:rows], self.labels[:rows], self.shared)

    def publish(self) -> None:
        """Bring what was read into ``windows`` to tokens and labels."""
        if not self.shared:
            np.copyto(self.tokens, self.windows[:, :-1])
            np.copyto(self.labels, self.windows[:, 1:])


def step_buffers(steps_ahead: int, rows: int, sequence: int, pin: bool) -> Iterator[StepBuffer]:
    """Buffers in turn, for ever: enough for the steps read ahead and for those handed out.

    ``pin``: page-locked memory, from which a GPU copies without the host's help. Such copies
    want contiguous rows; otherwise tokens and labels are two views of the same memory.
    """
    made = []
    for _ in range(steps_ahead + HELD_STEPS + 1):
        windows = np.empty((rows, sequence + 1), np.int64)
        tokens, labels = windows[:, :-1], windows[:, 1:]
        if pin:
            tokens, labels = pinned((rows, sequence)), pinned((rows, sequence))
        made.append(StepBuffer(windows, tokens, labels, shared=not pin))
    return cycle(made)


def pinned(shape: tuple[int, int]) -> NDArray[np.int64]:
    """Page-locked memory; it lives as long as the array or any view of it."""
    import torch  # the data room needs torch for nothing else

    memory: NDArray[np.int64] = torch.empty(shape, dtype=torch.int64, pin_memory=True).numpy()
    return memory
