"""Logs that somebody reads: requests to agents, and their answers on the way to the reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from phalanx.control.frames import framed
from phalanx.control.wire import LogPart, ReadLog, StopLog, encode

PARTS_WAITING = 256  # for a slow reader; more are dropped, which the reader is told
ANSWER_SECONDS = 10.0  # an agent must begin to answer


class LogRequests:
    """Who reads which log. ``push`` sends a frame to a node if it is connected."""

    def __init__(self, push: Callable[[int, bytes], bool]) -> None:
        self._push = push
        self._next = 1
        self._readers: dict[int, tuple[int, asyncio.Queue[LogPart]]] = {}  # node, parts
        self._dropped: dict[int, int] = {}

    def receive(self, node: int, part: LogPart) -> None:
        """Part of a log came from a node."""
        reader = self._readers.get(part.request)
        if reader is None or reader[0] != node:
            if not part.end:
                self._push(node, framed(encode(StopLog(request=part.request))))
            return
        try:
            reader[1].put_nowait(part)
        except asyncio.QueueFull:
            self._dropped[part.request] = self._dropped.get(part.request, 0) + 1

    def lost(self, node: int) -> None:
        """A node's connection broke: its logs end here."""
        for request, (of, parts) in list(self._readers.items()):
            if of == node:
                while parts.full():
                    parts.get_nowait()
                parts.put_nowait(LogPart(request=request, end=True, problem="the node is gone"))

    async def read(
        self, node: int, job: int, rank: int, tail_bytes: int, follow: bool
    ) -> AsyncIterator[bytes]:
        """What a node sends of a log, until it ends or the reader leaves."""
        request, self._next = self._next, self._next + 1
        parts: asyncio.Queue[LogPart] = asyncio.Queue(PARTS_WAITING)
        self._readers[request] = node, parts
        order = ReadLog(request=request, job=job, rank=rank, tail_bytes=tail_bytes, follow=follow)
        ended = not self._push(node, framed(encode(order)))
        if ended:
            yield b"[phalanx: the node is not connected]\n"
        try:
            while not ended:
                try:
                    async with asyncio.timeout(None if follow else ANSWER_SECONDS):
                        part = await parts.get()
                except TimeoutError:
                    yield b"[phalanx: the node does not answer]\n"
                    break
                ended = part.end
                dropped = self._dropped.pop(request, 0)
                if dropped:
                    yield f"[phalanx: {dropped} parts left out]\n".encode()
                if part.data:
                    yield part.data
                if part.problem:
                    yield f"[phalanx: {part.problem}]\n".encode()
        finally:
            del self._readers[request]
            if not ended:
                self._push(node, framed(encode(StopLog(request=request))))
