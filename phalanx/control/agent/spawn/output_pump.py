"""The output of programs on its way into their logs, within bounds of size and speed.

A program writes into a pipe, which its zygote empties into the log. A log never takes more room
than its bound, however fast its program writes: whoever floods it waits.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import time
from contextlib import suppress
from pathlib import Path

from phalanx.control.agent.safe_files import Owner, open_log
from phalanx.control.agent.spawn.log_keeping import KEPT_BYTES, MOST_BYTES, cut_open

CHUNK = 64 << 10
PIPE_BYTES = 1 << 20
CUT_EVERY = 4 << 20  # bytes between two looks at a log's size
TURN_SECONDS = 0.1
TURN_BYTES = 8 << 20  # in such a time: more than anybody reads, and little work for the zygote


class Pump:
    """One program's output. It ends when everybody who could write is gone."""

    def __init__(self, key: str, path: Path, owner: Owner | None = None) -> None:
        self.key = key
        self._log = open_log(path, owner)
        try:
            self._pipe, self.writer = os.pipe()
        except OSError:
            os.close(self._log)
            raise
        os.set_blocking(self._pipe, False)
        with suppress(OSError):  # a user may have too many large pipes already
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._unlooked = CUT_EVERY  # an earlier start may have left much
        self._turn_began, self._turn_bytes = 0.0, 0

    def fileno(self) -> int:
        """For the selector."""
        return self._pipe

    def move(self, most: int = CHUNK) -> int:
        """Some output into the log: how many bytes; 0: there is none now; -1: nor will there be."""
        try:
            data = os.read(self._pipe, most)
        except BlockingIOError:
            return 0
        except OSError:
            return -1
        if not data:
            return -1
        with suppress(OSError):  # a full disk costs lines of the log, never the run
            os.write(self._log, data)
        self._unlooked += len(data)
        if self._unlooked >= CUT_EVERY:
            self._unlooked = 0
            with suppress(OSError):
                cut_open(self._log, MOST_BYTES - 2 * CUT_EVERY, KEPT_BYTES)
        return len(data)

    def wait_seconds(self, moved: int) -> float:
        """How long the program has to wait after so many more bytes; 0: it may go on."""
        now = time.monotonic()
        if now - self._turn_began >= TURN_SECONDS:
            self._turn_began, self._turn_bytes = now, 0
        self._turn_bytes += moved
        return self._turn_began + TURN_SECONDS - now if self._turn_bytes >= TURN_BYTES else 0.0

    def close(self) -> None:
        """Let go of pipe and log."""
        for descriptor in (self._pipe, self._log):
            with suppress(OSError):
                os.close(descriptor)


class Pumps:
    """All programs of a zygote, attended to by its selector."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._open: list[Pump] = []
        self._resting: list[tuple[float, Pump]] = []  # until when a flood is held back

    def open(self, key: str, log: Path, owner: Owner | None = None) -> int:
        """A pipe for the output of a new program: its end to write to, which the caller closes."""
        pump = Pump(key, log, owner)
        self._open.append(pump)
        self._selector.register(pump, selectors.EVENT_READ)
        return pump.writer

    def attend(self, pump: Pump) -> None:
        """There is output, or an end of it."""
        moved = pump.move()
        if moved < 0:
            self._end(pump)
        elif wait := pump.wait_seconds(moved):
            self._selector.unregister(pump)
            self._resting.append((time.monotonic() + wait, pump))

    def wake(self) -> float | None:
        """Go on with whom was held back long enough; seconds until the next one may."""
        now = time.monotonic()
        for until, pump in [rest for rest in self._resting if rest[0] <= now]:
            self._resting.remove((until, pump))
            self._selector.register(pump, selectors.EVENT_READ)
        return min((until - now for until, _ in self._resting), default=None)

    def drain(self, key: str) -> None:
        """What a program has left in its pipe, before anybody hears that it ended."""
        for pump in [pump for pump in self._open if pump.key == key]:
            for _ in range(2 * PIPE_BYTES // CHUNK):  # others may still be writing
                if pump.move() <= 0:
                    break

    def close(self) -> None:
        """Let go of everything, as a child of the zygote does."""
        for pump in self._open:
            pump.close()
        self._open, self._resting = [], []

    def _end(self, pump: Pump) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(pump)
        self._open.remove(pump)
        pump.close()
