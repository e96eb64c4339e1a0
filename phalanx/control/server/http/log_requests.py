"""Logs that somebody reads: requests to agents, and their answers on the way to the reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import NamedTuple

import msgspec
from msgspec import Struct, structs

from phalanx.control.wire.agent_messages import (
    LogPart,
    ReadLog,
    ReadSteps,
    ReadTrace,
    StopLog,
    encode,
)
from phalanx.control.wire.websocket_frames import framed

PARTS_WAITING = 256  # for a slow reader; more are dropped, which the reader is told
ANSWER_SECONDS = 10.0  # an agent must begin to answer
LOOK_SECONDS = 0.5  # between two looks at where a followed job is
WHOLE_BYTES = 16 << 20  # of a log that began while its job was followed


class LogLocation(NamedTuple):
    """Where the rank runs whose log is followed."""

    node: int | None  # None: nowhere so far
    ended: bool  # its job has
    why: str = ""  # it is nowhere
    no_such_rank: bool = False  # an elastic job may have had it before


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

    async def read(self, node: int, job: int, rank: int, tail_bytes: int) -> AsyncIterator[bytes]:
        """What a node has of a log."""
        order = partial(ReadLog, job=job, rank=rank, tail_bytes=tail_bytes)
        async for part, dropped in self._parts(node, order, ANSWER_SECONDS):
            for piece in _shown(part, dropped):
                yield piece

    async def follow(
        self, whereabouts: Callable[[], LogLocation], job: int, rank: int, tail_bytes: int
    ) -> AsyncIterator[bytes]:
        """The end of a log and what is added to it, wherever the job goes, until it has ended."""
        seen: set[int] = set()
        last_problem = ""  # what was wrong last: said once, not at every look
        while True:
            at = whereabouts()
            if at.node is None:
                if at.why != last_problem:
                    last_problem = at.why
                    yield f"[phalanx: {last_problem}]\n".encode()
                if at.ended:
                    return
                await asyncio.sleep(LOOK_SECONDS)
                continue
            # Of a log that is read again, after its node was away, what is new; of one on a node
            # that the job moved to, everything.
            tail = 0 if at.node in seen else WHOLE_BYTES if seen else tail_bytes
            order = partial(ReadLog, job=job, rank=rank, tail_bytes=tail, follow=True)
            async for part, dropped in self._parts(
                at.node, order, ANSWER_SECONDS, until=_moved(whereabouts, at.node)
            ):
                if part.problem and part.problem == last_problem:
                    part = structs.replace(part, problem="")
                last_problem = part.problem or ("" if part.data else last_problem)
                for piece in _shown(part, dropped):
                    yield piece
            seen.add(at.node)
            if whereabouts().ended:
                return
            await asyncio.sleep(LOOK_SECONDS)

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
        self,
        node: int,
        order: Callable[..., Struct],
        patience: float,
        until: Callable[[], bool] | None = None,
    ) -> AsyncIterator[tuple[LogPart, int]]:
        """Parts that answer an order, each with how many were dropped before it.

        With ``until`` they come until it is true, and then whatever the node still has.
        """
        request, self._next = self._next, self._next + 1
        parts: asyncio.Queue[LogPart] = asyncio.Queue(PARTS_WAITING)
        self._readers[request] = node, parts
        ended = not self._push(node, framed(encode(order(request=request))))
        if ended:
            yield LogPart(request=request, end=True, problem="the node is not connected"), 0
        follows = until is not None
        try:
            while not ended:
                if follows and until is not None and until():
                    follows = False
                    self._push(node, framed(encode(StopLog(request=request, finish=True))))
                try:
                    async with asyncio.timeout(LOOK_SECONDS if follows else patience):
                        part = await parts.get()
                except TimeoutError:
                    if follows:
                        continue
                    problem = "the node does not answer"
                    yield LogPart(request=request, end=True, problem=problem), 0
                    break
                ended = part.end
                yield part, self._dropped.pop(request, 0)
        finally:
            del self._readers[request]
            if not ended:
                self._push(node, framed(encode(StopLog(request=request))))


def _moved(whereabouts: Callable[[], LogLocation], node: int) -> Callable[[], bool]:
    """Whether the log of a node is complete: its job has ended, or runs elsewhere."""

    def complete() -> bool:
        now = whereabouts()
        return now.ended or now.node not in (None, node)

    return complete


def _shown(part: LogPart, dropped: int) -> list[bytes]:
    """What a reader gets to see of a part."""
    found = [f"[phalanx: {dropped} parts left out]\n".encode()] if dropped else []
    found += [part.data] if part.data else []
    return found + ([f"[phalanx: {part.problem}]\n".encode()] if part.problem else [])
