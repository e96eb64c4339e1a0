"""Whether the cores of this machine have time left, as the kernel counts it."""

from __future__ import annotations

import time
from pathlib import Path

SECONDS = 1.0  # between two looks: a file of tests needs some time until it uses a core
SHARE = 0.25  # of all cores' time that must be left over


class IdleCores:
    """Says now and then that there was time left since it was asked before."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._asked = time.monotonic()
        self._idle, self._total = self._ticks()

    def left(self) -> bool:
        """Whether a share of the time since the last look was not used; False within a second."""
        if time.monotonic() < self._asked + SECONDS:
            return False
        before_idle, before_total = self._idle, self._total
        self._asked = time.monotonic()
        self._idle, self._total = self._ticks()
        passed = self._total - before_total
        return passed > 0 and self._idle - before_idle > SHARE * passed

    def _ticks(self) -> tuple[int, int]:
        """Idle ticks, those that waited for a disk among them, and all."""
        numbers = [int(each) for each in self._stat.read_text().split(maxsplit=9)[1:9]]
        return numbers[3] + numbers[4], sum(numbers)
