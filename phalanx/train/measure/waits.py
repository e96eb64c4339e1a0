"""How long this rank waits for its peers, where that can be told on the host's clock.

All ranks of a gang take equally long for a step; the slow one is that which waits least. With gloo
a collective blocks the thread that needs its result, in ``Work.wait``, so the time inside is
exactly the waiting. On CUDA the host does not block there, and traced steps tell instead.
"""

from __future__ import annotations

import threading
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import torch.distributed as dist

_WAIT: Any = dist.Work.wait if dist.is_available() else None


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
        _watch(self)

    def add(self, seconds: float) -> None:
        """A collective was waited for."""
        if threading.get_ident() == self._thread:
            self._seconds += seconds

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


_watching: PeerWaits | None = None  # the newest: a process trains one model at a time


def _watch(waits: PeerWaits) -> None:
    global _watching
    _watching = waits
    if dist.is_available() and dist.Work.wait is not _timed_wait:
        dist.Work.wait = _timed_wait  # type: ignore[assignment,method-assign]


_inside: dict[int, None] = {}  # threads that wait for peers now


def waits_now() -> bool:
    """Whether a thread of this process waits for a collective."""
    return bool(_inside)


def _timed_wait(work: Any, *args: Any, **named: Any) -> Any:
    began = perf_counter()
    _inside[threading.get_ident()] = None
    try:
        return _WAIT(work, *args, **named)
    finally:
        _inside.pop(threading.get_ident(), None)
        if _watching is not None:
            _watching.add(perf_counter() - began)
