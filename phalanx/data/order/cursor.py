"""Where a run stands in its data: everything a resumed run needs, and nothing else.

The samples of a run are numbered 0, 1, 2, … over all epochs. The cursor is the number up to
which they are done, the ranges of numbers never to be read, and the identity of the order.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from phalanx.data.order.skips import Ranges, Skips, pack, unpack


class Cursor(msgspec.Struct, frozen=True):
    """Every sample number below ``consumed`` is done: read, or in one of the ``ranges`` skipped.

    Ranges are half-open, sorted and apart; they stay in the list once passed, as the record
    of what the model never saw. The list has a bounded size: where a new range does not fit, the
    oldest ones that are passed become a mere count.
    """

    consumed: int = 0
    skipped: str | Ranges = ""  # given as ranges, kept packed
    fingerprint: str = ""

    def __post_init__(self) -> None:
        if self.consumed < 0:
            raise ValueError(f"cursor.consumed = {self.consumed}: must not be negative")
        if isinstance(self.skipped, str):
            unpack(self.skipped)
            return
        edges = [edge for span in self.skipped for edge in span]
        if edges and (edges[0] < 0 or any(a >= b for a, b in pairwise(edges))):
            raise ValueError(
                f"cursor.skipped = {self.skipped}: ranges must be [first, past) pairs, sorted and "
                "apart. Add ranges with Cursor.skip, which merges them."
            )
        packed = pack(Skips(0, 0, tuple(self.skipped)), self.consumed)
        msgspec.structs.force_setattr(self, "skipped", packed)

    @property
    def ranges(self) -> Ranges:
        """Sample numbers never to be read, as far as they are remembered one by one."""
        return self.skips.ranges

    @property
    def skips(self) -> Skips:
        """All that is known of skipped samples."""
        assert isinstance(self.skipped, str)
        return unpack(self.skipped)

    def skip(self, first: int, past: int) -> Cursor:
        """The cursor with sample numbers [first, past) added to those never to be read."""
        skipped = self.skips
        if not 0 <= first < past:
            raise ValueError(f"skip range [{first}, {past}): must be 0 <= first < past")
        if first < skipped.floor:
            raise ValueError(
                f"skip range [{first}, {past}): ranges before {skipped.floor} are only counted by "
                "now. Start from the checkpoint before it, whose cursor still knows them."
            )
        merged: list[tuple[int, int]] = []
        for start, stop in sorted([*skipped.ranges, (first, past)]):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        packed = pack(skipped._replace(ranges=tuple(merged)), self.consumed)
        return msgspec.structs.replace(self, skipped=packed)

    def upcoming(self, first: int, count: int) -> range | NDArray[np.int64]:
        """Sample numbers of the ``first``-th to ``first + count - 1``-th samples not yet done."""
        if not self._skips_ahead:
            return range(self.consumed + first, self.consumed + first + count)
        numbers = np.arange(first, first + count, dtype=np.int64) + self.consumed
        for start, stop in self.ranges:
            start = max(start, self.consumed)
            if start < stop:
                # Sorted, disjoint ranges: each moves on all numbers that reach it.
                numbers[numbers >= start] += stop - start
        return numbers

    def past(self, samples: int) -> int:
        """Number up to which samples are done after reading the next ``samples`` samples."""
        if self._skips_ahead and samples > 0:
            return int(self.upcoming(samples - 1, 1)[0]) + 1
        return self.consumed + samples

    def advance(self, samples: int) -> Cursor:
        """The cursor after reading the next ``samples`` samples."""
        return Cursor(self.past(samples), self.skipped, self.fingerprint)

    @property
    def next(self) -> int:
        """Number of the sample that is read next."""
        return int(self.upcoming(0, 1)[0]) if self._skips_ahead else self.consumed

    @property
    def _skips_ahead(self) -> bool:
        return bool(self.skipped) and self.ranges[-1][1] > self.consumed

    @property
    def seen(self) -> int:
        """Samples actually read: those done less those skipped."""
        if not self.skipped:
            return self.consumed
        return self.consumed - self.skips.before(self.consumed)
