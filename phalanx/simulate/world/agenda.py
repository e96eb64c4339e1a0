"""Virtual time: what happens next, in order of time and, at one time, of asking."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Agenda:
    """A heap of calls. Time is integer nanoseconds and only moves when a call is made."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.calls = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def at(self, time_ns: int, call: Callable[..., None], *args: Any) -> None:
        """Asks for a call at a time; one in the past is made now."""
        self._order += 1
        heappush(self._heap, (max(time_ns, self.now_ns), self._order, call, args))

    def after(self, delay_ns: int, call: Callable[..., None], *args: Any) -> None:
        """Asks for a call after some time."""
        self.at(self.now_ns + delay_ns, call, *args)

    def run(self, until_ns: int, most_calls: int = 1 << 62) -> bool:
        """Makes all calls up to a time. False when there were more than ``most_calls``."""
        heap = self._heap
        while heap and heap[0][0] <= until_ns:
            if self.calls >= most_calls:
                return False
            self.now_ns, _, call, args = heappop(heap)
            self.calls += 1
            call(*args)
        self.now_ns = max(self.now_ns, until_ns)
        return True
