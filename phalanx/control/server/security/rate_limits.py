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

    def take(self, caller: Hashable, now: float, cost: float = 1.0) -> float:
        """Takes one request; returns the seconds to wait when there is none (0: go on).

        One that costs more than the whole burst is let in by a full bucket.
        """
        if not self.per_second:
            return 0.0
        cost = min(cost, float(self.burst))
        left = self._left(caller, now)
        wait = 0.0 if left >= cost else (cost - left) / self.per_second
        self._buckets.pop(caller, None)
        self._buckets[caller] = (left if wait else left - cost, now)
        if len(self._buckets) > MOST_CALLERS:
            self._buckets.popitem(last=False)
        return wait

    def wait(self, caller: Hashable, now: float) -> float:
        """The seconds until there is a request to take (0: there is one); takes none."""
        if not self.per_second:
            return 0.0
        left = self._left(caller, now)
        return 0.0 if left >= 1.0 else (1.0 - left) / self.per_second

    def _left(self, caller: Hashable, now: float) -> float:
        left, since = self._buckets.get(caller, (float(self.burst), now))
        return min(float(self.burst), left + max(0.0, now - since) * self.per_second)
