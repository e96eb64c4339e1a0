"""Rate limits: a bucket of requests a caller, refilled at a steady rate."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

MOST_CALLERS = 10_000  # remembered at a time; whoever is forgotten starts with a full bucket


class RateLimit:
    """``per_second`` requests in the long run, ``burst`` at once; 0: no limit."""

    def __init__(self, per_second: float, burst: int) -> None:
        self.per_second, self.burst = per_second, burst
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def take(self, caller: Hashable, now: float) -> float:
        """Takes one request; returns the seconds to wait when there is none (0: go on)."""
        if not self.per_second:
            return 0.0
        left, since = self._buckets.pop(caller, (float(self.burst), now))
        left = min(float(self.burst), left + max(0.0, now - since) * self.per_second)
        wait = 0.0 if left >= 1.0 else (1.0 - left) / self.per_second
        self._buckets[caller] = (left if wait else left - 1.0, now)
        if len(self._buckets) > MOST_CALLERS:
            self._buckets.popitem(last=False)
        return wait
