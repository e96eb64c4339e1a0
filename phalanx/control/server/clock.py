"""The server's clock: wall time that neither jumps nor runs backwards."""

from __future__ import annotations

import time


class Clock:
    """Wall time at its start, and the monotonic clock from there on.

    Somebody who sets the machine's clock by hours does not make every deadline pass at once. It
    begins no earlier than ``not_before_ns`` (the end of the log).
    """

    def __init__(self, not_before_ns: int = 0) -> None:
        self._offset_ns = max(time.time_ns(), not_before_ns) - time.monotonic_ns()

    def now_ns(self) -> int:
        """Nanoseconds since 1970."""
        return time.monotonic_ns() + self._offset_ns

    def behind_ns(self) -> int:
        """How far the machine's own clock has moved away from this one."""
        return time.time_ns() - self.now_ns()
