"""Logs that somebody reads: requests to agents, and their answers on the way to the reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial

import msgspec
from msgspec import Struct

from phalanx.control.frames import framed
from phalanx.control.wire import LogPart, ReadLog, ReadSteps, ReadTrace, StopLog, encode

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

        def order(request: int) -> ReadLog:
            return ReadLog(
                request=request, job=job, rank=rank, tail_bytes=tail_bytes, follow=follow
            )

        async for part, dropped in self._parts(node, order, None if follow else ANSWER_SECONDS):
            if dropped:
                yield f"[phalanx: {dropped} parts left out]\n".encode()
            if part.data:
                yield part.data
            if part.problem:
                yield f"[phalanx: {part.problem}]\n".encode()

    async def steps(
        self, node: int, job: int, rank: int, first: int, last: int
    ) -> AsyncIterator[bytes]:
        """What ranks of a node recorded of some steps, as lines; a problem is a line, too."""

        order = partial(ReadSteps, job=job, rank=rank, first=first, last=last)
        async for part, dropped in self._parts(node, order, ANSWER_SECONDS):
            problem = f"{dropped} parts left out" if dropped else part.problem
            if problem:
                yield msgspec.json.encode({"node": node, "problem": problem}) + b"\n"
            yield part.data

    async def trace(
        self, node: int, job: int, rank: int, folder: str, after_ns: int
    ) -> AsyncIterator[LogPart]:
        """A rank's trace, piece by piece: the next one is asked for when the last one has come."""
        offset, ended = 0, False
        while not ended:
            order = partial(
                ReadTrace, job=job, rank=rank, folder=folder, after_ns=after_ns, offset=offset
            )
            async for part, _ in self._parts(node, order, ANSWER_SECONDS):
                offset += len(part.data)
                yield part
                ended = part.end or bool(part.problem)
                break

    async def _parts(
        self, node: int, order: Callable[..., Struct], patience: float | None
    ) -> AsyncIterator[tuple[LogPart, int]]:
        """Parts that answer an order, each with how many were dropped before it."""
        request, self._next = self._next, self._next + 1
        parts: asyncio.Queue[LogPart] = asyncio.Queue(PARTS_WAITING)
        self._readers[request] = node, parts
        ended = not self._push(node, framed(encode(order(request=request))))
        if ended:
            yield LogPart(request=request, end=True, problem="the node is not connected"), 0
        try:
            while not ended:
                try:
                    async with asyncio.timeout(patience):
                        part = await parts.get()
                except TimeoutError:
                    problem = "the node does not answer"
                    yield LogPart(request=request, end=True, problem=problem), 0
                    break
                ended = part.end
                yield part, self._dropped.pop(request, 0)
        finally:
            del self._readers[request]
            if not ended:
                self._push(node, framed(encode(StopLog(request=request))))
