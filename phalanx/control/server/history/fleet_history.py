"""How the fleet was: columns of node states and jobs over time, for the page's slider.

The core's log is the truth, but replaying it for every move of a slider would cost seconds. So
changes of the columns are kept as small differences with a whole frame now and then: any moment
is one frame and a few differences away. Losing this file loses the slider's past and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import zlib
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from phalanx.cluster.core import Core
from phalanx.cluster.fleet.columns import Column
from phalanx.observe.store.sqlite_file import open_or_begin_anew

logger = logging.getLogger("phalanx.server")

WHOLE_EVERY = 256  # differences between two whole frames
LEAST_SECONDS = 0.25  # between two frames
KEPT_NS = 30 * 24 * 3600 * 10**9
MOST_FRAMES = 200_000

JobStates = list[tuple[int, str, int]]


class FleetFrame(Struct):
    """The fleet at a moment; nodes that joined later are beyond the end of the columns."""

    time_ns: int
    state: Column
    job: Column  # the first that holds it; 0: none
    free_gpus: Column
    jobs: JobStates  # id, state and generation of those that had not ended


class StoredFrame(Struct, array_like=True):
    """A frame or a difference as it is stored; ``nodes`` None: all of them."""

    nodes: list[int] | None
    state: list[int]
    job: list[int]
    free_gpus: list[int]
    jobs: msgspec.Raw  # as JobStates: of many frames one's are looked at


def frame_of(core: Core, time_ns: int) -> FleetFrame:
    """The fleet now."""
    fleet, view = core.view.fleet, core.view
    job = np.zeros(len(fleet), np.int64)
    jobs, nodes, counts = [], list[int](), list[int]()
    for number in reversed(view.active):
        placement, before = view.jobs[number].placement, len(nodes)
        if placement is not None:
            nodes += placement.nodes
            nodes += placement.spares
        counts.append(len(nodes) - before)
    # One assignment for all: of a node that several hold, the last one stays.
    job[np.asarray(nodes, np.int64)] = np.repeat([*reversed(view.active)], counts)
    for number in (*view.active, *view.pending):
        known = view.jobs[number]
        jobs.append((number, str(known.state), known.generation))
    columns = fleet.columns
    return FleetFrame(time_ns, columns.state.copy(), job, columns.free_gpus.copy(), jobs)


class FleetHistory:
    """Frames in a file. Writing and reading happen in threads; the lock keeps them apart."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._last: FleetFrame | None = None
        self._since_whole = 0
        self._database = open_or_begin_anew(path, _database)

    async def follow(self, core: Core, changed: asyncio.Event) -> None:
        """Keeps what changes, until it is cancelled."""
        while True:
            changed.clear()
            frame, stored = self._next(core)
            if stored is not None:
                await asyncio.to_thread(self._store, frame.time_ns, stored)
            await asyncio.sleep(LEAST_SECONDS)
            await changed.wait()

    def keep(self, core: Core) -> None:
        """Keeps the fleet as it is now."""
        frame, stored = self._next(core)
        if stored is not None:
            self._store(frame.time_ns, stored)

    def _next(self, core: Core) -> tuple[FleetFrame, StoredFrame | None]:
        frame = frame_of(core, core.view.now_ns)
        return frame, self._difference(frame) if frame.time_ns else None  # 0: no event yet

    def _difference(self, frame: FleetFrame) -> StoredFrame | None:
        last, self._last = self._last, frame
        whole = last is None or self._since_whole >= WHOLE_EVERY
        if last is None or whole or len(last.state) != len(frame.state):
            self._since_whole = 0
            columns = (frame.state.tolist(), frame.job.tolist(), frame.free_gpus.tolist())
            return StoredFrame(None, *columns, _raw(frame.jobs))
        differs = (
            (last.state != frame.state)
            | (last.job != frame.job)
            | (last.free_gpus != frame.free_gpus)
        )
        nodes = np.flatnonzero(differs)
        if not len(nodes) and last.jobs == frame.jobs:
            return None
        self._since_whole += 1
        return StoredFrame(
            nodes.tolist(),
            frame.state[nodes].tolist(),
            frame.job[nodes].tolist(),
            frame.free_gpus[nodes].tolist(),
            _raw(frame.jobs),
        )

    def _store(self, time_ns: int, stored: StoredFrame) -> None:
        data = zlib.compress(msgspec.msgpack.encode(stored), 1)
        whole = stored.nodes is None
        try:
            with self._lock, self._database as database:
                insert = "INSERT OR REPLACE INTO frame VALUES (?, ?, ?)"
                database.execute(insert, (time_ns, whole, data))
                if whole:
                    self._forget(time_ns)
        except sqlite3.Error as error:  # a full disk: the past has a hole, the fleet goes on
            logger.warning("the page's history could not be kept: %s", error)
            self._last = None

    def _forget(self, now_ns: int) -> None:
        """Drops what is too old or too much; what is left begins with a whole frame."""
        execute = self._database.execute
        limit = execute(
            "SELECT time_ns FROM frame ORDER BY time_ns DESC LIMIT 1 OFFSET ?", (MOST_FRAMES,)
        ).fetchone()
        oldest = max(now_ns - KEPT_NS, limit[0] if limit else 0)
        first = execute(
            "SELECT MAX(time_ns) FROM frame WHERE whole AND time_ns <= ?", (oldest,)
        ).fetchone()[0]
        if first is not None:
            execute("DELETE FROM frame WHERE time_ns < ?", (first,))

    def at(self, time_ns: int) -> FleetFrame | None:
        """The fleet as it was at a time; the first that is known where it is too early."""
        with self._lock:
            execute = self._database.execute
            first = execute(
                "SELECT MAX(time_ns) FROM frame WHERE whole AND time_ns <= ?", (time_ns,)
            ).fetchone()[0]
            if first is None:
                first = execute("SELECT MIN(time_ns) FROM frame WHERE whole").fetchone()[0]
            if first is None:
                return None
            rows = execute(
                "SELECT time_ns, data FROM frame WHERE time_ns BETWEEN ? AND ? ORDER BY time_ns",
                (first, max(first, time_ns)),
            ).fetchall()
        frame: FleetFrame | None = None
        decoder, jobs = msgspec.msgpack.Decoder(StoredFrame), msgspec.Raw()
        for when, data in rows:
            stored = decoder.decode(zlib.decompress(data))
            jobs = stored.jobs
            state, job, free = (
                np.asarray(column, np.int64)
                for column in (stored.state, stored.job, stored.free_gpus)
            )
            if stored.nodes is None or frame is None:
                frame = FleetFrame(when, state, job, free, [])
                continue
            nodes = np.asarray(stored.nodes, np.int64)
            frame.state[nodes], frame.job[nodes], frame.free_gpus[nodes] = state, job, free
            frame.time_ns = when
        if frame is not None:
            frame.jobs = msgspec.msgpack.decode(jobs, type=JobStates)
        return frame

    def bounds(self) -> tuple[int, int]:
        """Times of the first and last frame; (0, 0): there is none."""
        with self._lock:
            found = self._database.execute(
                "SELECT MIN(time_ns), MAX(time_ns) FROM frame"
            ).fetchone()
        return found[0] or 0, found[1] or 0

    def close(self) -> None:
        """Let go of the file."""
        with self._lock, suppress(sqlite3.Error):
            self._database.close()


def _raw(jobs: JobStates) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(jobs))


def _database(path: Path) -> sqlite3.Connection:
    path.touch(mode=0o600)
    database = sqlite3.connect(path, check_same_thread=False)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=OFF")
    database.execute(
        "CREATE TABLE IF NOT EXISTS frame"
        " (time_ns INTEGER PRIMARY KEY, whole INTEGER NOT NULL, data BLOB NOT NULL)"
    )
    database.commit()
    return database
