"""How many requests the server takes of whom; what one of them may hold is ``body_limits``.

The numbers are options of the server (``control/server/process.py``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

MOST_CALLERS = 10_000  # remembered at a time; whoever is forgotten starts with a full bucket
LEAST_BODY_BYTES = 1 << 10  # that a request counts as


class RateLimit:
    """Of each caller: ``per_second`` requests in the long run, ``burst`` at once; 0: no limit."""

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


@dataclass(frozen=True)
class RequestLimits:
    """Which limits a request counts against. Methods return the seconds to wait; 0: go on."""

    tokens: RateLimit  # requests of one token, or of an address where no token is needed
    addresses: RateLimit  # requests without a good token: guessing is slow
    orders: RateLimit  # of one token: requests that change something
    refusals: RateLimit  # of one token: requests that were refused
    body_bytes: RateLimit  # of one token
    most_body_bytes: int  # of one request: a larger body is refused, and not read

    def take(self, token: str, now: float, *, order: bool, length: int) -> float:
        """Takes a request of a good token; ``order``: it changes something, by so long a body."""
        wait = self.tokens.take(token, now) or self.refusals.wait(token, now)
        if wait or not order:
            return wait
        wait = self.orders.take(token, now)
        if wait or length > self.most_body_bytes:
            return wait
        return self.body_bytes.take(token, now, max(length, LEAST_BODY_BYTES))
