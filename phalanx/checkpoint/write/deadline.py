"""How long training waits for a snapshot to be safe before it goes on without it."""

from __future__ import annotations

import statistics
from collections import deque

LEAST_SECONDS = 5.0  # a keeper on a busy node may be held up this long
SLACK = 4.0  # a snapshot may take this many times what is usual
REMEMBERED = 32
FIRST_BYTES_PER_SECOND = 100e6  # until something is measured: checksums, a network, a busy peer


class SnapshotDeadline:
    """Derived from what hand-overs took until they were acknowledged.

    Of the median, so that one keeper that stood still does not make the next one be waited for.
    """

    def __init__(self, shard_bytes: int) -> None:
        self._first = shard_bytes / FIRST_BYTES_PER_SECOND
        self._took: deque[float] = deque(maxlen=REMEMBERED)

    @property
    def seconds(self) -> float:
        """From the hand-over on."""
        usual = statistics.median(self._took) if self._took else self._first
        return max(LEAST_SECONDS, SLACK * usual)

    def acknowledged(self, seconds: float) -> None:
        """A snapshot was safe after this time."""
        self._took.append(seconds)
