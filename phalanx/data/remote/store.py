"""Ranges of objects in a store: fetched in parallel, tried again, asked for twice when slow.

One thread runs all requests of a process, however many are under way. The client is made in the
process that uses it: its own threads would not survive a fork.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from datetime import timedelta
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from phalanx.config import Store
from phalanx.config.errors import first_line
from phalanx.data.errors import DataError, ObjectStoreError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore

log = logging.getLogger(__name__)

_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.1, 5.0
_KNOWN_READS = 8  # before which nobody knows what is slow
_SHORTEST_HEDGE_SECONDS = 0.05

# Where cloud machines ask for the credentials of their role.
_METADATA_ADDRESS = "169.254.169.254"
_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role"

Result = TypeVar("Result")


class RangeStore:
    """A folder of an object store, named by its URL."""

    def __init__(self, url: str, settings: Store) -> None:
        self.url = url.rstrip("/")
        self._settings = settings
        self.parallel_reads = settings.parallel_reads
        self._client = connect(self.url)
        self._seconds: deque[float] = deque(maxlen=64)  # of recent reads
        self.reads = self.retries = self.hedges = 0
        self._answered = False  # the store has given something: its credentials were good
        self._loop = asyncio.new_event_loop()
        name = "phalanx-store"
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine in the store's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def read_all(self, name: str) -> bytes:
        """A small object as a whole; ``DataError`` where there is none."""

        async def get() -> bytes:
            found = await self._client.get_async(name)
            return bytes(await found.bytes_async())

        return await self._patiently(name, get)

    async def read(self, name: str, first: int, length: int) -> memoryview:
        """``length`` bytes of an object from byte ``first`` on."""

        async def get() -> memoryview:
            try:
                content = await self._client.get_range_async(name, start=first, length=length)
            except exceptions.GenericError:
                await self._refuse_short(name, first + length)
                raise
            if len(content) != length:
                await self._refuse_short(name, first + length)
                raise ConnectionError(f"{len(content)} bytes came, where {length} were asked for")
            return memoryview(content)

        from obstore import exceptions

        return await self._patiently(name, lambda: self._hedged(get))

    async def _refuse_short(self, name: str, needed: int) -> None:
        size = int((await self._client.head_async(name))["size"])
        if size < needed:
            rule = f"is truncated: {size} bytes, where the corpus needs {needed}"
            raise DataError("data.path", f"{self.url}/{name}", rule, "restore it")

    async def _hedged(self, get: Callable[[], Coroutine[Any, Any, memoryview]]) -> memoryview:
        """The answer of a request, or of a second one where the first is unusually slow."""
        began = time.monotonic()
        self.reads += 1
        running = {asyncio.create_task(get())}
        done, running = await asyncio.wait(running, timeout=self._hedge_seconds())
        if not done:
            self.hedges += 1
            running.add(asyncio.create_task(get()))
        try:
            while not done:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                if running and all(task.exception() for task in done):
                    done = set()  # the other one may still succeed
        finally:
            for task in running:
                task.cancel()
        self._seconds.append(time.monotonic() - began)
        return done.pop().result()

    def _hedge_seconds(self) -> float | None:
        factor = self._settings.hedge_factor
        if factor <= 0 or len(self._seconds) < _KNOWN_READS:
            return None
        return max(_SHORTEST_HEDGE_SECONDS, factor * median(self._seconds))

    async def _patiently(self, name: str, work: Callable[[], Awaitable[Result]]) -> Result:
        """Try again with growing pauses; what is missing or forbidden stays so."""
        from obstore import exceptions

        began, pause = time.monotonic(), _FIRST_WAIT_SECONDS
        while True:
            try:
                found = await work()
                self._answered = True
                return found
            except (FileNotFoundError, exceptions.NotFoundError):
                rule = "is part of the corpus but missing"
                raise DataError("data.path", f"{self.url}/{name}", rule, "restore it") from None
            except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
                raise ObjectStoreError(
                    self.url, name, f"access is refused: {_in_words(error)}"
                ) from None
            except (exceptions.BaseError, OSError, TimeoutError) as error:
                waited, reason = time.monotonic() - began, _in_words(error)
                if not self._answered and _METADATA_ADDRESS in reason:
                    raise ObjectStoreError(
                        self.url, name, reason
                    ) from None  # waiting makes no keys
                if waited + pause > self._settings.retry_seconds:
                    what = f"failed for {waited:.0f} s (data.store.retry_seconds): {reason}"
                    raise ObjectStoreError(self.url, name, what) from error
                if self.retries == 0 or pause >= 1:
                    log.warning("reading %s/%s again in %.1f s: %s", self.url, name, pause, reason)
                self.retries += 1
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, _LONGEST_WAIT_SECONDS)


def _in_words(error: Exception) -> str:
    """What a client says, without the dump of its insides."""
    text = str(error).partition("\n")[0]
    if _METADATA_ADDRESS in text:  # where the client looks for a machine's role, last of all
        return f"no credentials were found: {_CREDENTIALS} ({text})"
    return text


def open_store(url: str, settings: Store) -> RangeStore:
    """The store behind a URL: one for each process, whoever asks for it."""
    return _open_store(url, settings, os.getpid())


@lru_cache(maxsize=64)
def _open_store(url: str, settings: Store, process: int) -> RangeStore:
    return RangeStore(url, settings)


def connect(url: str, retries: int = 0) -> ObjectStore:
    """A client for s3://, gs://, az:// or file://; credentials come from the environment.

    ``retries``: of a request, by the client itself.
    """
    try:
        from obstore.store import from_url
    except ImportError:
        rule = "object stores are read with the package obstore, which is not installed"
        raise DataError("data.path", url, rule, "pip install 'phalanx[s3]'") from None
    try:
        if url.startswith("file://"):
            return from_url(url)
        options: ClientConfig = {"allow_http": True, "connect_timeout": timedelta(seconds=5)}
        # The retries of readers are their own: they know how long a run may wait.
        return from_url(url, client_options=options, retry_config={"max_retries": retries})
    except Exception as error:  # the client raises its own kinds, and ValueError
        reason = first_line(error)  # the client's inner life follows
        raise DataError("data.path", url, f"is no usable URL: {reason}", "correct it") from None
