"""What watchers of a keeper are told, each in a thread of its own: none stops the others."""

from __future__ import annotations

import threading
from collections.abc import Callable

from phalanx.checkpoint.wire import Noted

KEPT = 3  # newest steps of a rank that a watcher hears of after it stood still


class Notices:
    """Notes on their way to one watcher; while it reads nothing, old ones give way to new ones."""

    def __init__(self, tell: Callable[[Noted], None]) -> None:
        self._tell = tell
        self._waiting: list[Noted] = []
        self._change = threading.Condition()
        self._closed = False
        threading.Thread(target=self._send, daemon=True).start()

    def put(self, note: Noted) -> None:
        """Returns at once, whatever the watcher does."""
        with self._change:
            alike = [n for n in self._waiting if _origin(n) == _origin(note)]
            if len(alike) >= KEPT:
                self._waiting.remove(min(alike, key=lambda n: n.step))
            self._waiting.append(note)
            self._change.notify()

    def close(self) -> None:
        """The watcher is gone."""
        with self._change:
            self._closed = True
            self._change.notify()

    def _send(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                note = self._waiting.pop(0)
            self._tell(note)


def _origin(note: Noted) -> tuple[int, int, bool]:
    return note.rank, note.generation, note.replica
