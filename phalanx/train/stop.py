"""A signal asks the run to stop: the step is finished first."""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopFlag:
    """Remembers that somebody asked this rank to stop, and how."""

    def __init__(self) -> None:
        self.reason = ""

    @property
    def requested(self) -> bool:
        return bool(self.reason)

    def install(self) -> None:
        """Catch the signals that mean: finish the step, save, leave."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or signal.Signals(number).name
        if number == signal.SIGINT:
            # Left to the kernel, a second Ctrl-C ends even a rank that waits in a collective.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
