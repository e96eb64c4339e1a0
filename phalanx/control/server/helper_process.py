"""Work that takes seconds of a processor (plans, small simulations), beside the server.

One process of its own does it, so that agents and orders never wait for somebody's sliders.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import resource_tracker
from typing import ParamSpec, TypeVar

from phalanx.control.host.parent_death import follow

P = ParamSpec("P")
T = TypeVar("T")

TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP)
MOST_WAITING = 8
LIMIT_SECONDS = 60.0  # for one question, once its turn has come
PATIENCE_SECONDS = 120.0  # with the turns of others before it


class BusyError(Exception):
    """Too many wait already."""


class TooLongError(Exception):
    """A question that takes more than the server gives to one."""


class Helper:
    """The process; it is started when it is first asked, and ends with the server."""

    def __init__(self, limit_seconds: float = LIMIT_SECONDS) -> None:
        self.limit_seconds = limit_seconds
        self._pool: ProcessPoolExecutor | None = None
        self._waiting = 0

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a function of a module returns; BusyError where many wait already."""
        if self._waiting >= MOST_WAITING:
            raise BusyError("many ask for plans and simulations at the moment")
        self._waiting += 1
        try:
            asked = partial(function, *args, **kwargs)
            with _held_back(TERMINAL_SIGNALS):  # also from the process that may be started here
                pool = self._pool = self._pool or self._start()
                future = pool.submit(_bounded, asked, self.limit_seconds)
            async with asyncio.timeout(self.limit_seconds + PATIENCE_SECONDS):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise BusyError("others' plans and simulations take very long") from None
        except BrokenProcessPool:
            self._pool = None
            raise BusyError("the helper's process ended; ask again") from None
        finally:
            self._waiting -= 1

    def _start(self) -> ProcessPoolExecutor:
        # It keeps a list of the pool's semaphores, ignores Ctrl-C but not a closed terminal, and
        # allows SIGINT again to whoever starts it: before the process that must not get that.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL_SIGNALS)
        spawn = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(1, spawn, initializer=_settle, initargs=(os.getpid(),))

    def close(self) -> None:
        """End the process, also in the middle of a question."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.kill()


@contextmanager
def _held_back(signals: tuple[signal.Signals, ...]) -> Iterator[None]:
    """A process that is started inside never gets these signals: it ends with its parent.

    Ctrl-C reaches every process of a terminal, and would end this one with a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _bounded(asked: Callable[[], T], seconds: float) -> T:
    """In the process: one question's answer, or TooLongError."""

    def over(*_: object) -> None:
        raise TooLongError(
            f"this takes more than {seconds:.0f} s: ask for less, or use the command line"
        )

    signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return asked()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _settle(server: int) -> None:
    follow(server)
    os.nice(10)
