"""Parts of remote files in a bounded folder of the node, shared by all its processes."""

from __future__ import annotations

import asyncio
import fcntl
import os
import tempfile
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from phalanx.config import Store
from phalanx.data.remote.store import RangeStore, open_store

PART_BYTES = 4 << 20  # of one ranged read: long enough that its latency is small beside it
_LOCKS = 256
_MAPS_KEPT = 1024
_BUSY_SECONDS = 0.02
_ROOM_SHARE = 0.9  # of the limit is left filled when old parts are removed

Part: TypeAlias = tuple[str, int, int]  # file, first byte, bytes


class PartCache:
    """Fetches parts in the order they are asked for; one that is waited for goes first.

    A part's file appears complete or not at all, and is fetched by one process of the node.
    """

    def __init__(self, store: RangeStore, folder: Path, settings: Store) -> None:
        self.store, self.folder = store, folder
        folder.mkdir(parents=True, exist_ok=True)
        self._limit_bytes = int(settings.cache_gb * 1e9)
        self._unswept_bytes = self._limit_bytes  # what earlier runs left is looked at first
        self._idle = settings.parallel_reads
        self._lock = threading.Lock()
        self._waiting: OrderedDict[Part, Future[None]] = OrderedDict()
        self._fetching: dict[Part, Future[None]] = {}
        self._maps: OrderedDict[Part, NDArray[np.uint8]] = OrderedDict()

    def request(self, part: Part, urgent: bool = False) -> Future[None] | None:
        """See to it that a part is fetched; None where it is here already."""
        with self._lock:
            if part in self._fetching:
                return self._fetching[part]
            if part in self._waiting:
                if urgent:
                    self._waiting.move_to_end(part, last=False)
                return self._waiting[part]
            if part in self._maps or self._path(part).exists():
                return None
            future: Future[None] = Future()
            self._waiting[part] = future
            if urgent:
                self._waiting.move_to_end(part, last=False)
            if self._idle:
                self._idle -= 1
                self.store.submit(self._work())
            return future

    def content(self, part: Part) -> NDArray[np.uint8]:
        """The bytes of a part; waits for them where they are not here yet."""
        mapped = self._maps.get(part)
        while mapped is None:
            waited = self.request(part, urgent=True)
            if waited is not None:
                waited.result()
            mapped = self._map(part)
        return mapped

    def forget(self, part: Part) -> None:
        """Remove a part that turned out wrong, so that it is fetched again."""
        with self._lock:
            self._maps.pop(part, None)
            self._path(part).unlink(missing_ok=True)

    def _map(self, part: Part) -> NDArray[np.uint8] | None:
        path = self._path(part)
        try:
            mapped = np.asarray(np.memmap(path, np.uint8, "r"))
            os.utime(path)  # used now: the oldest are removed first
        except (FileNotFoundError, ValueError):  # removed meanwhile, to make room
            return None
        with self._lock:
            self._maps[part] = mapped
            if len(self._maps) > _MAPS_KEPT:
                self._maps.popitem(last=False)
        return mapped

    async def _work(self) -> None:
        """Fetch parts until none is waiting."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._idle += 1
                    return
                part, future = self._waiting.popitem(last=False)
                self._fetching[part] = future
            try:
                await self._fetch(part)
            except BaseException as error:
                with self._lock:
                    del self._fetching[part]
                future.set_exception(error)
            else:
                with self._lock:
                    del self._fetching[part]
                future.set_result(None)

    async def _fetch(self, part: Part) -> None:
        name, first, length = part
        path = self._path(part)
        while not path.exists():
            with self._claimed(part) as claimed:
                if claimed and not path.exists():
                    data = await self.store.read(name, first, length)
                    await asyncio.to_thread(self._keep, path, data)
                    return
            if not claimed:  # another process of the node is at it
                await asyncio.sleep(_BUSY_SECONDS)

    @contextmanager
    def _claimed(self, part: Part) -> Iterator[bool]:
        """Whether this process may fetch a part; a dead one's claim is void."""
        number = zlib.crc32(repr(part).encode()) % _LOCKS
        lock = os.open(self.folder / f"lock-{number:03d}", os.O_CREAT | os.O_RDWR)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(lock)

    def _keep(self, path: Path, data: memoryview) -> None:
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_bytes(data)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        with self._lock:  # several parts may have come at once
            self._unswept_bytes += len(data)
            sweep = self._unswept_bytes > self._limit_bytes * (1 - _ROOM_SHARE)
            self._unswept_bytes *= not sweep
        if sweep:
            evict_parts(self.folder.parent, self._limit_bytes)

    def _path(self, part: Part) -> Path:
        name, first, length = part
        return self.folder / f"{name}.{first}+{length}.part"


def evict_parts(root: Path, limit_bytes: int) -> int:
    """Remove the parts used longest ago until the cache is below its limit; returns bytes left.

    A part that another process has mapped stays readable for it.
    """
    files = []
    for path in root.glob("*/*.part"):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        files.append((status.st_mtime_ns, status.st_size, path))
    total = sum(size for _, size, _ in files)
    if total <= limit_bytes:
        return total
    for _, size, path in sorted(files):
        if total <= limit_bytes * _ROOM_SHARE:
            break
        path.unlink(missing_ok=True)
        total -= size
    return total


def cache_root(settings: Store) -> Path:
    """The folder of all cached corpora."""
    if settings.cache:
        return Path(settings.cache)
    return Path(tempfile.gettempdir()) / f"phalanx-cache-{os.getuid()}"


def open_cache(url: str, fingerprint: str, settings: Store) -> PartCache:
    """The cache of a corpus: one for each process, whoever asks for it."""
    return _open_cache(url, fingerprint, settings, os.getpid())


@lru_cache(maxsize=64)
def _open_cache(url: str, fingerprint: str, settings: Store, process: int) -> PartCache:
    folder = cache_root(settings) / f"{url.rstrip('/').rsplit('/', 1)[-1]}-{fingerprint}"
    return PartCache(open_store(url, settings), folder, settings)
