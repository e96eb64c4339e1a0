"""How long a device waits for copies of the state, measured without making the host wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch

new_event: Callable[[], torch.cuda.Event] = partial(torch.cuda.Event, enable_timing=True)


class DeviceWaits:
    """Each wait is bracketed by two events, which are read once the device has passed them."""

    def __init__(self) -> None:
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._spare: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def wait(self, copied: torch.cuda.Event) -> None:
        """The current stream waits for a copy."""
        before, after = self._spare.pop() if self._spare else (new_event(), new_event())
        before.record()
        copied.wait()
        after.record()
        self._pending.append((before, after))

    def passed(self) -> list[float]:
        """Seconds of the waits that are over and were not told before."""
        wait_seconds = []
        while self._pending and self._pending[0][1].query():
            before, after = self._pending.popleft()
            wait_seconds.append(before.elapsed_time(after) / 1e3)
            self._spare.append((before, after))
        return wait_seconds
