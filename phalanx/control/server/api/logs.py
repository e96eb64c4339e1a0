"""Logs of ranks: one, or several as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import msgspec

from phalanx.cluster.jobs.job import ClusterJob
from phalanx.control.server.http.endpoints import EVERYBODY, ApiError, Call, Endpoints
from phalanx.control.server.http.log_requests import LogEnd, LogLocation
from phalanx.control.wire import api_types as t
from phalanx.control.wire.log_cursor import LogCursor, LogPiece

MOST_RANKS = 64  # whose logs one request reads
LINES_WAITING = 64
LONGEST_LINE = 1 << 20

ENDPOINTS = Endpoints()


@ENDPOINTS.add("GET /v1/jobs/{job}/logs", EVERYBODY, params=t.JobPath, query=t.LogsQuery)
async def job_logs(call: Call) -> AsyncIterator[bytes]:
    """Stream the log of a rank, or of several: then every line begins with its rank.

    Its end, and what comes until the job has ended, if followed. With ``cursors`` as lines of JSON,
    each with a place that ``after`` takes, so that another connection goes on exactly there.
    """
    query = call.query
    cursor = _cursor(query)
    ranks = ranks_named(query.ranks)
    if ranks:
        pieces = merged({rank: _log_of(call, rank, cursor) for rank in ranks})
    else:
        pieces = _log_of(call, query.rank, cursor)
    if query.cursors:
        return with_cursors(pieces, cursor)
    lines = texts_of(pieces)
    return lines_with(query.grep, lines) if query.grep else lines


def _cursor(query: t.LogsQuery) -> LogCursor:
    if query.grep and query.cursors:
        rule = "cursors are places in whole logs: leave grep out"
        raise ApiError(409, "grep_with_cursors", rule)
    if query.after and not query.follow:
        rule = "only a followed log goes on after a place: add follow=true"
        raise ApiError(409, "after_without_follow", rule)
    return LogCursor(query.after)


async def texts_of(pieces: AsyncIterator[LogPiece]) -> AsyncIterator[bytes]:
    """A log as its text alone."""
    async for piece in pieces:
        if piece.data:
            yield piece.data


async def with_cursors(pieces: AsyncIterator[LogPiece], cursor: LogCursor) -> AsyncIterator[bytes]:
    """Lines of JSON, each with where the next one begins."""
    async for piece in pieces:
        if piece.place is not None:
            cursor.note(piece.place)
        yield msgspec.json.encode(t.LogPieceOut(data=piece.data, cursor=str(cursor))) + b"\n"


def _log_of(call: Call, rank: int, cursor: LogCursor) -> AsyncIterator[LogPiece]:
    job, query = call.job(), call.query
    at = _whereabouts(call, job.id, rank)
    if at.no_such_rank:
        raise ApiError(404, "no_such_rank", at.why)
    requests = call.leading.hub.logs
    wanted = LogEnd(
        job=job.id, rank=rank, tail_bytes=query.tail_bytes, since_seconds=query.since_seconds
    )
    if query.follow:
        find = partial(_whereabouts, call, job.id, rank)
        return requests.follow(find, wanted, cursor.of_rank(rank))
    if at.node is None:
        raise ApiError(409, "not_started", at.why)
    return requests.read(at.node, wanted)


def ranks_named(text: str) -> list[int]:
    """Ranks of a list like ``0,4-7``; ApiError where it names too many."""
    ranks: dict[int, None] = {}
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        span = range(int(first), int(last or first) + 1)
        if len(span) + len(ranks) > MOST_RANKS:
            raise ApiError(409, "too_many_ranks", f"{MOST_RANKS} ranks are read at a time")
        ranks |= dict.fromkeys(span)
    return list(ranks)


async def lines_with(text: str, log: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The lines of a log that have a text in them, whole, however the log is cut into pieces."""
    wanted, rest = text.lower().encode(), b""
    async for part in log:
        *lines, rest = (rest + part).split(b"\n")
        found = b"".join(line + b"\n" for line in lines if wanted in line.lower())
        if found:
            yield found
        if len(rest) > LONGEST_LINE:  # nobody gathers a line without end
            rest = rest[-LONGEST_LINE // 2 :]
    if wanted in rest.lower():
        yield rest + b"\n"


async def merged(logs: dict[int, AsyncIterator[LogPiece]]) -> AsyncIterator[LogPiece]:
    """Logs of ranks as one, line by line as they come, each with its rank before it."""
    waiting: asyncio.Queue[LogPiece | None] = asyncio.Queue(LINES_WAITING)

    async def read(rank: int, log: AsyncIterator[LogPiece]) -> None:
        try:
            async for piece in _marked(log, f"[{rank}] ".encode()):
                await waiting.put(piece)
        finally:
            await waiting.put(None)

    tasks = [asyncio.create_task(read(rank, log)) for rank, log in logs.items()]
    try:
        ended = 0
        while ended < len(tasks):
            lines = await waiting.get()
            if lines is None:
                ended += 1
            else:
                yield lines
    finally:
        for task in tasks:
            task.cancel()


async def _marked(log: AsyncIterator[LogPiece], mark: bytes) -> AsyncIterator[LogPiece]:
    """Whole lines with a mark before each."""
    last = LogPiece(b"")  # a line that is not complete
    async for piece in log:
        if piece.place is None:  # the server's own words are lines
            yield LogPiece(b"".join(mark + line for line in piece.data.splitlines(True)))
            continue
        *lines, rest = (last.data + piece.data).split(b"\n")
        if len(rest) > LONGEST_LINE:  # nobody gathers a line without end
            lines, rest = [*lines, rest], b""
        yield piece.before(b"".join(mark + line + b"\n" for line in lines), len(rest))
        last = piece._replace(data=rest)
    if last.data:
        yield last.before(mark + last.data + b"\n", 0)


def _whereabouts(call: Call, number: int, rank: int) -> LogLocation:
    """The node whose agent has a rank's log."""
    job = call.leading.core.view.jobs.get(number)
    if job is None:
        return LogLocation(None, ended=True, why=f"job {number} is no longer known")
    ended = job.ended
    nodes = call.leading.controller.memory.placed.get(job.id, ())
    if not nodes:
        return LogLocation(None, ended, f"job {job.id} has not started: {job.why}")
    slot, ranks = max(rank, 0) // max(job.spec.gang.slot_gpus, 1), _ranks(job, len(nodes))
    if rank >= ranks:
        why = f"job {job.id} has ranks 0 to {ranks - 1}"
        return LogLocation(None, ended, why, no_such_rank=True)
    return LogLocation(nodes[slot], ended)


def _ranks(job: ClusterJob, slots: int) -> int:
    """Ranks of a job on so many nodes, also of one that has left them."""
    shape = job.spec.gang
    replicas = job.placement.replicas if job.placement is not None else job.wanted_replicas
    full = slots * max(1, shape.slot_gpus)
    return shape.ranks(replicas) if shape.slots(replicas) == slots else full
