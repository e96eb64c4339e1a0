"""Workers' logs on a node: read on request, followed, and kept bounded."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from phalanx.control.crew import Crew
from phalanx.control.hands import Here
from phalanx.control.wire import LogPart, ReadLog

PART_BYTES = 64 << 10
FOLLOW_SECONDS = 0.2
MOST_BYTES = 64 << 20  # of one file; the half before it is kept beside it
ROTATE_SECONDS = 10.0


class LogReader:
    """Answers requests for logs; ``send`` takes the parts."""

    def __init__(self, crew: Crew, send: Callable[[msgspec.Struct], None]) -> None:
        self._crew, self._send = crew, send
        self._readers: dict[int, asyncio.Task[None]] = {}

    def read(self, order: ReadLog) -> None:
        """Send the end of a log, and what follows if asked."""
        self._readers[order.request] = asyncio.ensure_future(self._read(order))

    def stop(self, request: int) -> None:
        """Nobody reads any more."""
        task = self._readers.pop(request, None)
        if task is not None:
            task.cancel()

    def stop_all(self) -> None:
        """The server is gone."""
        for request in list(self._readers):
            self.stop(request)

    async def _read(self, order: ReadLog) -> None:
        files = self._files(order)
        try:
            if not files:
                problem = f"no log of job {order.job} here"
                self._send(LogPart(request=order.request, problem=problem))
            places = {}
            for path, label in files:
                start = max(0, path.stat().st_size - order.tail_bytes) if path.exists() else 0
                places[path] = self._part(order.request, path, start, label)
            while order.follow and files:
                await asyncio.sleep(FOLLOW_SECONDS)
                for path, label in files:
                    places[path] = self._part(order.request, path, places[path], label)
            self._send(LogPart(request=order.request, end=True))
        except OSError as error:
            self._send(LogPart(request=order.request, end=True, problem=str(error)))
        finally:
            self._readers.pop(order.request, None)

    def _files(self, order: ReadLog) -> list[tuple[Path, str]]:
        folder = self._crew.state / "jobs" / str(order.job)
        here = self._crew.jobs.get(order.job) or Here(order.job, folder, folder)
        if order.rank >= 0:
            found = [i for i, hand in here.hands.items() if hand.rank == order.rank]
            index = found[0] if found else 0
            return [(here.log(index), "")] if here.log(index).exists() else []
        ranks = {here.log(index): f"[{hand.rank}] " for index, hand in here.hands.items()}
        return [(path, ranks.get(path, "")) for path in sorted(folder.glob("worker-*.log"))]

    def _part(self, request: int, path: Path, start: int, label: str) -> int:
        """Send what lies behind a place; returns the place behind it."""
        with suppress(FileNotFoundError), path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < start:
                start = 0  # it was rotated
            file.seek(start)
            while data := file.read(PART_BYTES):
                start += len(data)
                if label:
                    data = b"".join(label.encode() + line for line in data.splitlines(True))
                self._send(LogPart(request=request, data=data))
        return start

    async def rotate_forever(self) -> None:
        """Keep every log below its bound. Writers append, so the file is emptied, not moved."""
        while True:
            await asyncio.sleep(ROTATE_SECONDS)
            for path in (self._crew.state / "jobs").glob("*/*.log"):
                with suppress(OSError):
                    if path.stat().st_size > MOST_BYTES:
                        rotate(path)


def rotate(path: Path) -> None:
    """Move the content of a log that is being written to the file beside it."""
    before = path.with_suffix(".log.1")
    with path.open("rb+") as file:
        before.write_bytes(file.read())
        file.truncate(0)
