"""Followed logs: what is added is read, wherever the job goes, until it has ended."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from phalanx.control.agent.inspect import logs as agent_logs
from phalanx.control.agent.inspect.logs import LogReader
from phalanx.control.server.api.logs import lines_with, merged, with_cursors
from phalanx.control.server.http import log_requests
from phalanx.control.server.http.log_requests import LogEnd, LogLocation, LogRequests
from phalanx.control.wire.agent_messages import LogPart, ReadLog, StopLog, decode_down
from phalanx.control.wire.api_types import LogPieceOut
from phalanx.control.wire.log_cursor import (
    MOST_PLACES,
    PLACES,
    LogCursor,
    LogPiece,
    LogPlace,
)

WANTED = LogEnd(job=7, rank=0, tail_bytes=1024, since_seconds=3.0)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_logs, "FOLLOW_SECONDS", 0.01)
    monkeypatch.setattr(log_requests, "LOOK_SECONDS", 0.01)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not true():
            await asyncio.sleep(0.005)


def test_an_agent_follows_every_log_of_a_job_and_reads_it_to_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "jobs" / "7"
    folder.mkdir(parents=True)
    sent: list[LogPart] = []
    node_jobs: Any = SimpleNamespace(state=tmp_path, jobs={})

    def text() -> bytes:
        return b"".join(part.data for part in sent)

    async def scenario() -> None:
        reader = LogReader(node_jobs, sent.append)  # type: ignore[arg-type]
        reader.read(ReadLog(request=1, job=7, follow=True))
        first = folder / "worker-0.log"
        first.write_text("one\n")  # the file comes after the reader
        await until(lambda: b"one" in text())
        (folder / "worker-1.log").write_text("another\n")
        await until(lambda: b"another" in text())
        with first.open("a") as file:
            file.write("last\n")
        reader.stop(1, finish=True)
        await until(lambda: sent[-1].end)

    asyncio.run(scenario())
    assert text().endswith(b"last\n") and text().count(b"one") == 1


def test_a_log_is_read_on_from_a_place_and_labels_stand_before_whole_lines(tmp_path: Path) -> None:
    folder = tmp_path / "jobs" / "7"
    folder.mkdir(parents=True)
    first, other = folder / "worker-0.log", folder / "worker-1.log"
    first.write_text("one\ntwo\nthr")
    sent: list[LogPart] = []
    processes = {0: SimpleNamespace(rank=4), 1: SimpleNamespace(rank=5)}
    node_jobs: Any = SimpleNamespace(state=tmp_path, jobs={7: SimpleNamespace(processes=processes)})

    def text() -> bytes:
        return b"".join(part.data for part in sent)

    async def scenario() -> None:
        reader = LogReader(node_jobs, sent.append)  # type: ignore[arg-type]
        reader.read(ReadLog(request=1, job=7, follow=True, resume=True, places={0: 4}))
        await until(lambda: b"two" in text())
        with first.open("a") as file:
            file.write("ee\nfour")
        await until(lambda: b"three" in text())
        assert (sent[-1].worker, sent[-1].behind) == (0, 14)
        other.write_text("began meanwhile\n")
        await until(lambda: b"meanwhile" in text())
        reader.stop(1, finish=True)
        await until(lambda: sent[-1].end)

    asyncio.run(scenario())
    assert text() == b"[4] two\n[4] three\n[5] began meanwhile\n[4] four"


def test_lines_of_several_ranks_say_where_the_reader_stands() -> None:
    async def log(rank: int, *pieces: bytes) -> AsyncIterator[LogPiece]:
        behind = 0
        for data in pieces:
            behind += len(data)
            yield LogPiece(data, LogPlace(rank, 3, 0, behind))
        yield LogPiece(b"[phalanx: the node is gone]\n")

    async def scenario() -> None:
        cursor, text = LogCursor("1.2.0.9"), b""
        async for line in with_cursors(merged({0: log(0, b"on", b"e\ntw")}), cursor):
            piece = msgspec.json.decode(line, type=LogPieceOut)
            text += piece.data
            if b"one" in piece.data:
                assert piece.cursor == "1.2.0.9_0.3.0.4"  # not behind what was held back
                assert LogCursor(piece.cursor).of_rank(0) == {3: {0: 4}}
        assert text == b"[0] one\n[0] [phalanx: the node is gone]\n[0] tw\n"

    asyncio.run(scenario())


def test_a_cursor_of_a_job_that_has_moved_a_lot_forgets_the_oldest_places() -> None:
    cursor = LogCursor()
    for node in range(2 * MOST_PLACES):
        cursor.note(LogPlace(-1, node, 7, 1 << 50))
    found = LogCursor(str(cursor)).of_rank(-1)
    assert list(found) == list(range(MOST_PLACES, 2 * MOST_PLACES))
    assert len(str(cursor)) <= 20_000
    assert re.match(PLACES, str(cursor)) and re.match(PLACES, "")
    assert not any(re.match(PLACES, text) for text in ("x", "0.1.2", "0.1.2.-3", "0.1.2.3;"))


class Nodes:
    """Nodes that hold what their ranks wrote, and answer as agents do."""

    def __init__(self) -> None:
        self.logs: dict[int, list[bytes]] = {1: [], 2: []}
        self.following: dict[int, int] = {}  # by request, the node
        self.requests: LogRequests = LogRequests(self.push)
        self.asked: list[ReadLog] = []

    def push(self, node: int, frame: bytes) -> bool:
        order = decode_down(frame[2:])  # behind the frame's header
        if isinstance(order, ReadLog):
            self.asked.append(order)
            self.following[order.request] = node
            if order.tail_bytes:
                for data in self.logs[node]:
                    self.requests.receive(node, LogPart(request=order.request, data=data))
        elif isinstance(order, StopLog) and order.finish:
            del self.following[order.request]
            last = LogPart(request=order.request, data=b"last of %d\n" % node, end=True)
            self.requests.receive(node, last)
        return True

    def write(self, node: int, data: bytes) -> None:
        self.logs[node].append(data)
        for request, of in self.following.items():
            if of == node:
                self.requests.receive(node, LogPart(request=request, data=data))


def test_a_reader_waits_for_the_start_moves_with_the_job_and_leaves_when_it_has_ended() -> None:
    nodes = Nodes()
    at = [LogLocation(None, False, "job 7 has not started: in the queue")]
    text = bytearray()

    async def scenario() -> None:
        async def read() -> None:
            async for piece in nodes.requests.follow(lambda: at[0], WANTED, {}):
                text.extend(piece.data)

        reading = asyncio.create_task(read())
        await until(lambda: b"in the queue" in text)
        at[0] = LogLocation(1, False)
        await until(lambda: bool(nodes.following))
        nodes.write(1, b"step 1\n")
        await until(lambda: b"step 1" in text)
        nodes.write(2, b"step 2\n")
        at[0] = LogLocation(2, False)
        await until(lambda: b"step 2" in text)
        at[0] = LogLocation(2, True)
        await asyncio.wait_for(reading, 120)

    asyncio.run(scenario())
    assert bytes(text).splitlines()[1:] == [b"step 1", b"last of 1", b"step 2", b"last of 2"]
    assert not nodes.following
    # Elsewhere all is new, whenever it was written.
    assert [each.since_seconds for each in nodes.asked] == [3.0, 0.0]


def test_only_lines_with_a_text_come_however_the_log_is_cut() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b"a lo", b"ss spike\nfine\nLOSS ", b"again\nthe l", b"oss ends"):
            yield piece

    async def found() -> bytes:
        return b"".join([piece async for piece in lines_with("Loss", pieces())])

    assert asyncio.run(found()) == b"a loss spike\nLOSS again\nthe loss ends\n"


def test_a_job_that_ended_without_a_start_has_no_log_to_follow() -> None:
    async def read() -> bytes:
        requests = LogRequests(lambda node, frame: True)
        where = LogLocation(None, True, "job 7 has not started: cancelled")
        return b"".join([part.data async for part in requests.follow(lambda: where, WANTED, {})])

    assert b"has not started: cancelled" in asyncio.run(asyncio.wait_for(read(), 10))
