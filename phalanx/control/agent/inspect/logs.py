"""Workers' logs on a node: read on request, followed, and kept bounded."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

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
from phalanx.control.wire.agent_messages import LogPart, ReadLog

PART_BYTES = 64 << 10
FOLLOW_SECONDS = 0.2
MOST_FOLLOWED_BYTES = 256 << 10  # in that time: more than anybody reads, less than a flood
CUT_SECONDS = 0.5  # a rank that floods writes some 100 MB in it
TIDY_LOOKS = 600
WORKER_LOG = re.compile(r"worker-(\d+)\.log(\.gz)?")


class LogReader:
    """Answers requests for logs; ``send`` takes the parts."""

    def __init__(self, node_jobs: NodeJobs, send: Callable[[msgspec.Struct], None]) -> None:
        self._node_jobs, self._send = node_jobs, send
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
                if path.suffix == ".gz":
                    data = await asyncio.to_thread(read_end, path, order.tail_bytes)
                    self._say(order.request, data, label)
                    places[path] = 0
                    continue
                start = max(0, path.lstat().st_size - order.tail_bytes) if path.exists() else 0
                most = max(order.tail_bytes, MOST_FOLLOWED_BYTES)
                places[path] = self._part(order.request, path, start, label, most)
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
                    start = places.get(path, 0)
                    places[path] = self._part(order.request, path, start, label)
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

    def _part(
        self, request: int, path: Path, start: int, label: str, most: int = MOST_FOLLOWED_BYTES
    ) -> int:
        """Send what lies behind a place, of too much the end; returns the place behind it."""
        with suppress(FileNotFoundError), read_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < start:
                start = 0  # it was emptied
            first = beginning(file.fileno())
            if start < first:
                self._say(request, dropped_note(first), label)
                start = first
            if size - start > most:
                skipped = size - most - start
                note = (
                    f"... {skipped} bytes are left out: they come faster than they can be shown\n"
                )
                self._say(request, note.encode(), label)
                start = size - most
            file.seek(start)
            while start < size and (data := file.read(min(PART_BYTES, size - start))):
                start += len(data)
                self._say(request, data, label)
        return start

    def _say(self, request: int, data: bytes, label: str) -> None:
        if label:
            data = b"".join(label.encode() + line for line in data.splitlines(True))
        self._send(LogPart(request=request, data=data))

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
        for path in jobs.glob("*/*.log"):
            with suppress(OSError):
                cut(path)
