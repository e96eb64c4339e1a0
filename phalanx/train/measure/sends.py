"""What this rank sends to single others (pipeline stages, rings), and how long that takes.

A send lasts until its receiver is there, so one alone may tell of a late peer instead of a slow
link. Of a step's sends of one size to one rank the shortest met a receiver that was waiting: it
stands for all of them. With NCCL a work tells its own time on the device, if ``time_sends`` was
called before there was a group; with gloo a thread that had to wait for a send knows when it was
over.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from time import perf_counter
from typing import Any, NamedTuple

from phalanx.train.measure.wait_hooks import watch_sends
from phalanx.train.report.records import SendTimes

MOST_OPEN = 4  # works of the device that are kept: each keeps the tensor that it sent
HIDDEN_SECONDS = 50e-6  # a send that was waited for no longer was over before, nobody knows when


def time_sends() -> None:
    """Have NCCL time its works; to be called before there is a group."""
    os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")


class _SendGroup(NamedTuple):
    """Sends that take equally long."""

    size: int
    peer: int


class Sends:
    """The sends of this process, step by step."""

    def __init__(self, *, on_device: bool) -> None:
        self._on_device = on_device
        self._open: deque[tuple[_SendGroup, Any]] = deque(maxlen=MOST_OPEN)  # of the device
        self._began: dict[int, tuple[_SendGroup, float]] = {}  # of the host, by the work's identity
        self._times: dict[_SendGroup, list[float]] = {}
        watch_sends(self)

    def sent(self, size: int, peer: int, work: Any) -> None:
        """So many bytes are on their way."""
        if work is None:
            return
        if self._on_device:
            self._look()
            self._open.append((_SendGroup(size, peer), work))
        else:
            self._began[id(work)] = _SendGroup(size, peer), perf_counter()

    def settled(self, work: Any, blocked_seconds: float) -> None:
        """A thread waited for a work."""
        begun = self._began.pop(id(work), None)
        if begun is not None and blocked_seconds > HIDDEN_SECONDS:
            link, at = begun
            self._add(link, perf_counter() - at)

    def take(self) -> SendTimes | None:
        """Sends whose times became known since the last call; None: of none."""
        self._look()
        times, self._times = self._times, {}
        self._began.clear()  # whoever was not waited for within its step is gone
        if not times:
            return None
        return SendTimes(
            bytes=sum(link.size * len(each) for link, each in times.items()),
            seconds=sum(min(each) * len(each) for each in times.values()),
        )

    def _look(self) -> None:
        """Read the times of works that are over; never waits."""
        waiting = [(link, work) for link, work in self._open if not self._read(link, work)]
        self._open = deque(waiting, maxlen=MOST_OPEN)

    def _read(self, link: _SendGroup, work: Any) -> bool:
        with suppress(RuntimeError):  # it keeps no time, or its group is gone
            if not work.is_completed():
                return False
            self._add(link, work._get_duration() / 1e3)
        return True

    def _add(self, link: _SendGroup, seconds: float) -> None:
        self._times.setdefault(link, []).append(seconds)
