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
    ReadEvidence,
    ReadLog,
    ReadSteps,
    ReadTrace,
    StopLog,
    encode,
)
from phalanx.control.wire.log_cursor import LogPiece, LogPlace
from phalanx.control.wire.websocket_frames import framed

PARTS_WAITING = 256  # for a slow reader; more are dropped, which the reader is told
ANSWER_SECONDS = 10.0  # an agent must begin to answer
LOOK_SECONDS = 0.5  # between two looks at where a followed job is
WHOLE_BYTES = 16 << 20  # of a log that began while its job was followed
MOST_WORKERS = 4096  # of a node, whatever its agent says
NOT_CONNECTED = "the node is not connected"
GONE, SILENT = "the node is gone", "the node does not answer"


class LogLocation(NamedTuple):
    """Where the rank runs whose log is followed."""

    node: int | None  # None: nowhere so far
    ended: bool  # its job has
    why: str = ""  # it is nowhere
    no_such_rank: bool = False  # an elastic job may have had it before


class LogEnd(Struct, frozen=True, kw_only=True):
    """Which end of which log somebody wants."""

    job: int
    rank: int
    tail_bytes: int
    since_seconds: float = 0.0
    resume: bool = False
    places: dict[int, int] = {}


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
                parts.put_nowait(LogPart(request=request, end=True, problem=GONE))

    async def read(self, node: int, wanted: LogEnd) -> AsyncIterator[LogPiece]:
        """What a node has of a log."""
        order = partial(ReadLog, **structs.asdict(wanted))
        async for part, dropped in self._parts(node, order, ANSWER_SECONDS):
            for piece in _shown(part, dropped, wanted.rank, node):
                yield piece

    async def follow(
        self,
        whereabouts: Callable[[], LogLocation],
        wanted: LogEnd,
        read: dict[int, dict[int, int]],
    ) -> AsyncIterator[LogPiece]:
        """The end of a log and what is added to it, wherever the job goes, until it has ended.

        ``read``: places by node and worker up to which an earlier connection has come; then nodes
        have a moment to connect to a server that has just been started.
        """
        now = asyncio.get_running_loop().time
        patient_until = now() + (ANSWER_SECONDS if read else 0.0)
        last_problem = ""  # what was wrong last: said once, not at every look
        while True:
            at = whereabouts()
            if at.node is None:
                if at.why != last_problem:
                    last_problem = at.why
                    yield LogPiece(f"[phalanx: {last_problem}]\n".encode())
                if at.ended:
                    return
                await asyncio.sleep(LOOK_SECONDS)
                continue
            order = partial(ReadLog, **structs.asdict(_unread(wanted, read, at.node)), follow=True)
            async for part, dropped in self._parts(
                at.node, order, ANSWER_SECONDS, until=_moved(whereabouts, at.node)
            ):
                if part.problem not in (NOT_CONNECTED, GONE, SILENT):
                    places = read.setdefault(at.node, {})
                    if _of_file(part):
                        places[part.worker] = part.behind
                patient = part.problem == NOT_CONNECTED and now() < patient_until
                if patient or (part.problem and part.problem == last_problem):
                    part = structs.replace(part, problem="")
                last_problem = part.problem or ("" if part.data else last_problem)
                for piece in _shown(part, dropped, wanted.rank, at.node):
                    yield piece
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

    async def evidence(
        self, node: int, job: int, generation: int, rank: int
    ) -> AsyncIterator[bytes]:
        """What ranks of a node were seen doing when they made no more steps."""
        order = partial(ReadEvidence, job=job, generation=generation, rank=rank)
        async for part, dropped in self._parts(node, order, ANSWER_SECONDS):
            for piece in _shown(part, dropped, rank, node):
                yield piece.data

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
            yield LogPart(request=request, end=True, problem=NOT_CONNECTED), 0
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
                    yield LogPart(request=request, end=True, problem=SILENT), 0
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


def _unread(wanted: LogEnd, read: dict[int, dict[int, int]], node: int) -> LogEnd:
    """Of a log that is read again what is new; of one on a node that a job moved to, everything."""
    if not read:
        return wanted
    places = read.get(node, {})
    return structs.replace(
        wanted, resume=True, places=places, tail_bytes=WHOLE_BYTES, since_seconds=0.0
    )


def _of_file(part: LogPart) -> bool:
    return 0 <= part.worker < MOST_WORKERS and part.behind >= 0


def _shown(part: LogPart, dropped: int, rank: int, node: int) -> list[LogPiece]:
    """What a reader gets to see of a part."""
    place = LogPlace(rank, node, part.worker, part.behind) if _of_file(part) else None
    found = [LogPiece(f"[phalanx: {dropped} parts left out]\n".encode())] if dropped else []
    found += [LogPiece(part.data, place)] if part.data or place else []
    return found + ([LogPiece(f"[phalanx: {part.problem}]\n".encode())] if part.problem else [])
