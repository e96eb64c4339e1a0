"""A signal asks the run to stop: the step is finished first, or the start is given up."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

OVERDUE_SECONDS = 30.0  # most engines kill after less than a minute or two
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Those that stop a run here: not SIGHUP under ``nohup``, which outlives its terminal."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(n for n in STOP_SIGNALS if n != signal.SIGHUP or not ignored)


class StoppedEarly(BaseException):
    """Somebody asked the run to stop before this rank had made a step."""


class StopFlag:
    """Remembers that somebody asked this rank to stop, and how."""

    def __init__(self) -> None:
        self.reason = ""
        self._since = 0.0  # that it is known
        self._starting = False

    @property
    def requested(self) -> bool:
        return bool(self.reason)

    def overdue(self) -> bool:
        """Whether somebody asked so long ago that nothing but the disk is waited for."""
        if self.requested:
            self._since = self._since or time.monotonic()
        return self.requested and time.monotonic() - self._since > OVERDUE_SECONDS

    def install(self) -> None:
        """Catch the signals that mean: finish the step, save, leave."""
        for number in stop_signals():
            signal.signal(number, self._on_signal)

    def starting(self) -> None:
        """Until ``started`` there is nothing to save: a signal raises ``StoppedEarly``."""
        self._starting = True
        self._leave_if_asked()

    def started(self) -> None:
        """From now on a signal is remembered and read between steps."""
        self._starting = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or signal.Signals(number).name
        if number == signal.SIGINT:
            # Left to the kernel, a second Ctrl-C ends even a rank that waits in a collective.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        self._leave_if_asked()

    def _leave_if_asked(self) -> None:
        if self._starting and self.requested:
            self._starting = False  # once: a second signal must not disturb the leaving
            raise StoppedEarly


@contextmanager
def left_on_signal(say: Callable[[str], None]) -> Iterator[None]:
    """Inside, while torch loads and no rank runs yet, a stop signal ends the command with 0."""

    def leave(number: int, frame: FrameType | None) -> None:
        say(signal.Signals(number).name)
        raise SystemExit(0)

    # Not SIGINT: that is Python's own KeyboardInterrupt.
    before = {n: signal.signal(n, leave) for n in stop_signals() if n != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
