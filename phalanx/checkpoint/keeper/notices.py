"""What watchers of a keeper are told, each in a thread of its own: none stops the others."""

from __future__ import annotations

import threading
from collections.abc import Callable

from phalanx.checkpoint.keeper.messages import Noted

KEPT = 3  # newest steps of a rank that a watcher hears of after it stood still


class Notices:
    """Notes to one watcher: at once while it reads, else by a thread that waits for it.

    While it reads nothing, old notes give way to new ones.
    """

    def __init__(self, tell: Callable[[Noted], None], takes_more: Callable[[], bool]) -> None:
        self._tell, self._takes_more = tell, takes_more
        self._waiting: list[Noted] = []
        self._sending = False
        self._change = threading.Condition()
        self._closed = False
        threading.Thread(target=self._send, daemon=True).start()

    def put(self, note: Noted) -> None:
        """Returns at once, whatever the watcher does."""
        with self._change:
            if not (self._waiting or self._sending) and self._takes_more():
                self._tell(note)
                return
            alike = [n for n in self._waiting if _origin(n) == _origin(note)]
            if len(alike) >= KEPT:
                self._waiting.remove(alike[0])
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
                note, self._sending = self._waiting.pop(0), True
            self._tell(note)
            with self._change:
                self._sending = False


def _origin(note: Noted) -> tuple[int, int, bool]:
    return note.rank, note.generation, note.replica
