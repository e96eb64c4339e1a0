"""How long this rank waits for its peers, where that can be told on the host's clock.

All ranks of a gang take equally long for a step; the slow one is that which waits least. With gloo
a collective blocks the thread that needs its result, so the time inside is exactly the waiting. On
CUDA the stream waits and the host goes on: ``device_clock`` marks that with events.
"""

from __future__ import annotations

import threading
from pathlib import Path
from time import perf_counter, thread_time
from typing import NamedTuple

from phalanx.train.measure.wait_hooks import watch


class ThreadWaits(NamedTuple):
    """How a thread spent its time between two looks, in seconds."""

    peers: float  # blocked in collectives
    cores: float  # ready to run, with every core taken by somebody else; also within collectives
    working: float  # on a core


class PeerWaits:
    """What one thread has spent waiting for its peers, and for a core to run on."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._seconds = 0.0
        self._schedule = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._cores_seconds, self._worked = self._waited_for_cores(), thread_time()
        watch(self)

    def wait_begins(self) -> float | None:
        """A collective is waited for; other threads' waits hold no step up."""
        return perf_counter() if threading.get_ident() == self._thread else None

    def wait_ends(self, begun: float) -> None:
        self._seconds += perf_counter() - begun

    def take(self) -> ThreadWaits:
        """Seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        before, self._cores_seconds = self._cores_seconds, self._waited_for_cores()
        worked, self._worked = self._worked, thread_time()
        return ThreadWaits(seconds, self._cores_seconds - before, max(0.0, self._worked - worked))

    def leave_out(self, worked: float) -> None:
        """So much of the work since the last call was beside the step."""
        self._worked += worked

    def _waited_for_cores(self) -> float:
        try:
            return int(self._schedule.read_bytes().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):  # a kernel that does not count it
            return 0.0
