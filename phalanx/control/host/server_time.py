"""The server's time on another machine, whatever becomes of that machine's clock."""

from __future__ import annotations

import time


class ServerTime:
    """What the server said at the last welcome, and what has passed since.

    Somebody who sets this machine's clock by hours keeps no heartbeat back and ends no lease. Time
    that a machine is suspended counts: its jobs may run elsewhere since.
    """

    def __init__(self) -> None:
        self.set(time.time_ns())

    def set(self, clock_ns: int) -> None:
        """The server's clock, as it was said just now."""
        self._offset_ns = clock_ns - _passed_ns()

    def now_ns(self) -> int:
        """Nanoseconds since 1970."""
        return _passed_ns() + self._offset_ns

    @property
    def skew_ns(self) -> int:
        """To be added to this machine's clock, as it is set now."""
        return self.now_ns() - time.time_ns()


def _passed_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
