"""Workers' logs on a node: read on request, followed, and kept bounded."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from phalanx.control.agent.jobs.jobs import NodeJobs
from phalanx.control.agent.safe_files import read_regular
from phalanx.control.agent.spawn.log_keeping import (
    beginning,
    compress_ended,
    cut,
    dropped_note,
    expire,
    noted_ranks,
    read_end,
)
from phalanx.control.agent.spawn.log_times import LogTimes, bytes_since, read_marks
from phalanx.control.wire.agent_messages import LogPart, ReadLog

PART_BYTES = 64 << 10
FOLLOW_SECONDS = 0.2
MOST_FOLLOWED_BYTES = 256 << 10  # in that time: more than anybody reads, less than a flood
MOST_RESUMED_BYTES = 16 << 20  # of what was written while nobody could read on
CUT_SECONDS = 0.5  # a rank that floods writes some 100 MB in it
TIDY_LOOKS = 600
WORKER_LOG = re.compile(r"worker-(\d+)\.log(\.gz)?")


class _Source(NamedTuple):
    """Whose lines they are that answer a request."""

    request: int
    path: Path
    label: str  # before each line; "": none
    worker: int

    @staticmethod
    def of(request: int, path: Path, label: str) -> _Source:
        named = WORKER_LOG.fullmatch(path.name)
        return _Source(request, path, label, int(named[1]) if named else -1)


class LogReader:
    """Answers requests for logs; ``send`` takes the parts."""

    def __init__(self, node_jobs: NodeJobs, send: Callable[[msgspec.Struct], None]) -> None:
        self._node_jobs, self._send = node_jobs, send
        self._times = LogTimes()
        self._readers: dict[int, asyncio.Task[None]] = {}
        self._finishing: set[int] = set()  # followed logs to which nothing is added any more

    def read(self, order: ReadLog) -> None:
        """Send the end of a log, and what follows if asked."""
        self._readers[order.request] = asyncio.ensure_future(self._read(order))

    def stop(self, request: int, finish: bool = False) -> None:
        """Nobody reads any more; or, to ``finish``, nothing follows what is written by now."""
        if finish and request in self._readers:
            self._finishing.add(request)
            return
        task = self._readers.pop(request, None)
        if task is not None:
            task.cancel()

    def stop_all(self) -> None:
        """The server is gone."""
        for request in list(self._readers):
            self.stop(request)

    async def _read(self, order: ReadLog) -> None:
        files, problem = self._files(order)
        try:
            if problem:
                self._send(LogPart(request=order.request, problem=problem))
            places = {}
            for path, label in files:
                source = _Source.of(order.request, path, label)
                if path.suffix == ".gz":
                    await self._packed(order, source)
                    continue
                tail = _tail(order, path)
                start = max(0, path.lstat().st_size - tail) if path.exists() else 0
                if order.resume:
                    start, tail = order.places.get(source.worker, 0), MOST_RESUMED_BYTES
                most = max(tail, MOST_FOLLOWED_BYTES)
                places[path] = self._part(source, start, not order.follow, most)
                self._say(source, b"", places[path])  # also of one that has nothing new
            if order.follow:
                await self._follow(order, places)
            self._send(LogPart(request=order.request, end=True))
        except OSError as error:
            self._send(LogPart(request=order.request, end=True, problem=str(error)))
        finally:
            self._readers.pop(order.request, None)
            self._finishing.discard(order.request)

    async def _follow(self, order: ReadLog, places: dict[Path, int]) -> None:
        """Send what is added to the logs, also to those that other ranks begin meanwhile."""
        finishing = False
        while not finishing:
            finishing = order.request in self._finishing  # then this is the last look
            for path, label in self._files(order)[0]:
                if path.suffix != ".gz":
                    source = _Source.of(order.request, path, label)
                    places[path] = self._part(source, places.get(path, 0), finishing)
            if not finishing:
                await asyncio.sleep(FOLLOW_SECONDS)

    def _files(self, order: ReadLog) -> tuple[list[tuple[Path, str]], str]:
        """The logs that somebody asks for, with their labels; or why there are none."""
        folder = self._node_jobs.state / "jobs" / str(order.job)
        job = self._node_jobs.jobs.get(order.job)
        ranks = dict(enumerate(noted_ranks(folder)))
        if job is not None:
            ranks |= {index: process.rank for index, process in job.processes.items()}
        files = sorted(
            (int(named[1]), path)
            for path in folder.glob("worker-*.log*")
            if (named := WORKER_LOG.fullmatch(path.name))
        )
        if not files:
            return [], f"no log of job {order.job} here"
        if order.rank < 0:
            labels = {index: f"[{rank}] " for index, rank in ranks.items()}
            return [(path, labels.get(index, "")) for index, path in files], ""
        own = [(path, "") for index, path in files if ranks.get(index) == order.rank][:1]
        if own or ranks:
            return own, "" if own else f"no log of rank {order.rank} of job {order.job} here"
        problem = f"nobody noted which log here is rank {order.rank}'s: read all, without a rank"
        return [], problem

    async def _packed(self, order: ReadLog, source: _Source) -> None:
        """Send the end of a compressed log; an older one, where another is being written."""
        older = source.path.with_suffix("").exists()
        start, tail = 0, _tail(order, source.path)
        if order.resume and source.worker in order.places:
            if older:
                return
            start, tail = order.places[source.worker], MOST_RESUMED_BYTES
        data, behind = await asyncio.to_thread(read_end, source.path, tail, start)
        if older:
            source = source._replace(worker=-1)
        self._say(source, data, behind)

    def _part(
        self, source: _Source, start: int, complete: bool, most: int = MOST_FOLLOWED_BYTES
    ) -> int:
        """Send what lies behind a place, of too much the end; returns the place behind it.

        Of labelled lines only whole ones are sent, unless the log is ``complete``.
        """
        with suppress(FileNotFoundError), read_regular(source.path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < start:
                start = 0  # it was emptied
            first = beginning(file.fileno())
            if start < first:
                self._say(source, dropped_note(first), first)
                start = first
            if size - start > most:
                skipped = size - most - start
                note = (
                    f"... {skipped} bytes are left out: they come faster than they can be shown\n"
                )
                start = size - most
                self._say(source, note.encode(), start)
            file.seek(start)
            while start < size and (data := file.read(min(PART_BYTES, size - start))):
                if source.label and not (complete and start + len(data) == size):
                    data = _whole_lines(data)
                    file.seek(start + len(data))
                if not data:
                    break
                start += len(data)
                self._say(source, data, start)
        return start

    def _say(self, source: _Source, data: bytes, behind: int) -> None:
        if source.label:
            data = b"".join(source.label.encode() + line for line in data.splitlines(True))
        self._send(LogPart(request=source.request, data=data, worker=source.worker, behind=behind))

    async def rotate_forever(self) -> None:
        """Keep every log below its bound, and old ones for their time."""
        looks = 0
        while True:
            await asyncio.sleep(CUT_SECONDS)
            jobs, running = (
                self._node_jobs.state / "jobs",
                [str(job) for job in self._node_jobs.jobs],
            )
            await asyncio.to_thread(self._cut, jobs)
            looks += 1
            if looks % TIDY_LOOKS == 0:
                await asyncio.to_thread(compress_ended, jobs, running)
                await asyncio.to_thread(expire, jobs, running)

    def _cut(self, jobs: Path) -> None:
        now, paths = time.time(), list(jobs.glob("*/*.log"))
        self._times.forget_others(paths)
        for path in paths:
            with suppress(OSError):
                if named := WORKER_LOG.fullmatch(path.name):
                    self._times.look(path, int(named[1]), now)
                cut(path)


def _whole_lines(data: bytes) -> bytes:
    """All but a last line that is not complete yet; a part of a line without end as it is."""
    end = data.rfind(b"\n") + 1
    return data if not end and len(data) == PART_BYTES else data[:end]


def _tail(order: ReadLog, path: Path) -> int:
    """Bytes of the end of a log that are wanted: so many, or those since a time."""
    named = WORKER_LOG.fullmatch(path.name)
    if not order.since_seconds or named is None:
        return order.tail_bytes
    size = None if path.suffix == ".gz" else path.lstat().st_size
    since = time.time() - order.since_seconds
    return min(order.tail_bytes, bytes_since(read_marks(path.parent), int(named[1]), since, size))
