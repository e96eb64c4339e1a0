"""A thread that computes the next values of a pure sequence before they are asked for."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

State = TypeVar("State")
Item = TypeVar("Item")


class ReadAhead(Generic[State, Item]):
    """Items ``make(s)``, ``make(follow(s))``, … kept up to ``depth`` ahead by one thread.

    An exception of ``make`` is raised at the item that it belongs to, not before.
    """

    def __init__(
        self,
        make: Callable[[State], Item],
        follow: Callable[[State], State],
        first: State,
        depth: int,
    ) -> None:
        self.upcoming = first  # state of the item that take() will return
        self._make = make
        self._follow = follow
        self._depth = depth
        self._ready: deque[tuple[Item | None, BaseException | None]] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, args=(first,), daemon=True)
        self._thread.name = "phalanx-read-ahead"
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether take() can be called: a forked child inherits the object, not its thread."""
        return self._process == os.getpid() and not self._stopped

    def take(self) -> Item:
        """The next item, or the exception that making it raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready)
            item, error = self._ready.popleft()
            self._changed.notify_all()
        if error is not None:
            self.stop()
            raise error
        self.upcoming = self._follow(self.upcoming)
        return item  # type: ignore[return-value]  # an item that is None is Item's own

    def stop(self) -> None:
        """End the thread; what it has read ahead is dropped."""
        if not self.alive:
            return  # in a forked child the lock may be held for ever
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self, state: State) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or len(self._ready) < self._depth)
                if self._stopped:
                    return
            item, failure = None, None
            try:
                item = self._make(state)
                state = self._follow(state)
            except BaseException as error:
                failure = error
            with self._changed:
                self._ready.append((item, failure))
                self._changed.notify_all()
            if failure is not None:
                return
