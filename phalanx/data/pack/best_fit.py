"""Best-fit packing: whole documents into samples of one length, none cut, little padding."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

OPEN_SAMPLES = 512  # that a document may still join: bounds memory, and hardly costs padding

Unit = TypeVar("Unit")


class BestFit(Generic[Unit]):
    """Puts each unit where it leaves the least room; what comes out follows from the input alone.

    ``most_open`` samples wait for more; 1 gives every unit a sample of its own.
    """

    def __init__(
        self, sequence: int, *, alone: bool = False, most_open: int = OPEN_SAMPLES
    ) -> None:
        self._sequence, self._alone, self._most_open = sequence, alone, most_open
        self._samples: dict[int, list[Unit]] = {}
        self._spaces: list[tuple[int, int]] = []  # tokens left, number of the sample; ascending
        self._next = 0

    def add(self, unit: Unit, tokens: int) -> Iterator[list[Unit]]:
        """Place a unit; yields samples that are complete."""
        assert 0 < tokens <= self._sequence
        if self._alone:
            yield [unit]
            return
        at = bisect_left(self._spaces, (tokens, 0))
        if at < len(self._spaces):
            left, number = self._spaces.pop(at)
        else:
            left, number = self._sequence, self._next
            self._samples[number] = []
            self._next += 1
        self._samples[number].append(unit)
        if left > tokens:
            insort(self._spaces, (left - tokens, number))
        else:
            yield self._samples.pop(number)
        if len(self._spaces) > self._most_open:
            yield self._samples.pop(self._spaces.pop(0)[1])  # the fullest

    def finish(self) -> Iterator[list[Unit]]:
        """The samples that are left, the oldest first."""
        for number in sorted(self._samples):
            yield self._samples[number]
        self._samples, self._spaces = {}, []
