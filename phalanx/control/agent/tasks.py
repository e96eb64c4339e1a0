"""Work that an agent does beside what it was just told, and that nobody waits for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

AGAIN_SECONDS = 5.0  # before a loop that failed is begun anew

log = logging.getLogger("phalanx.agent")


class Tasks:
    """Tasks that run until they end; what fails is logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin some work."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def close(self) -> None:
        """End all of it."""
        for task in self._tasks:
            task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("an order failed", exc_info=task.exception())


async def kept(loop: Callable[[], Awaitable[None]]) -> None:
    """A loop that runs for as long as the agent does, also where it fails now and then.

    A node without descriptors, threads or room on its disk for a while would otherwise never be
    heard of again: what its programs do, say, by which they are judged to hang.
    """
    said = ""
    while True:
        try:
            await loop()
            return
        except Exception as error:
            problem, trace = f"{loop.__qualname__} failed and goes on: {error!r}", error
        if problem != said:
            log.error("%s", problem, exc_info=trace)
            said = problem
        await asyncio.sleep(AGAIN_SECONDS)
