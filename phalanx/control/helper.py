"""Work that takes seconds of a processor (plans, small simulations), beside the server.

One process of its own does it, so that agents and orders never wait for somebody's sliders.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import ParamSpec, TypeVar

from phalanx.control.parent import follow

P = ParamSpec("P")
T = TypeVar("T")

MOST_WAITING = 8


class BusyError(Exception):
    """Too many wait already."""


class Helper:
    """The process; it is started when it is first asked, and ends with the server."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._waiting = 0

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a function of a module returns; BusyError where many wait already."""
        if self._waiting >= MOST_WAITING:
            raise BusyError("many ask for plans and simulations at the moment")
        self._waiting += 1
        try:
            pool = self._pool = self._pool or self._start()
            future = pool.submit(function, *args, **kwargs)
            return await asyncio.wrap_future(future)
        except BrokenProcessPool:
            self._pool = None
            raise BusyError("the helper's process ended; ask again") from None
        finally:
            self._waiting -= 1

    def _start(self) -> ProcessPoolExecutor:
        spawn = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(1, spawn, initializer=_settle, initargs=(os.getpid(),))

    def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _settle(server: int) -> None:
    follow(server)
    os.nice(10)
