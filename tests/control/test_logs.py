"""Followed logs: what is added is read, wherever the job goes, until it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.control.agent.inspect import logs as agent_logs
from phalanx.control.agent.inspect.logs import LogReader
from phalanx.control.server.http import log_requests
from phalanx.control.server.http.log_requests import LogLocation, LogRequests
from phalanx.control.wire.agent_messages import LogPart, ReadLog, StopLog, decode_down


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_logs, "FOLLOW_SECONDS", 0.01)
    monkeypatch.setattr(log_requests, "LOOK_SECONDS", 0.01)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
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
            async for piece in nodes.requests.follow(lambda: at[0], 7, 0, 1024):
                text.extend(piece)

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
        await asyncio.wait_for(reading, 10)

    asyncio.run(scenario())
    assert bytes(text).splitlines()[1:] == [b"step 1", b"last of 1", b"step 2", b"last of 2"]
    assert not nodes.following


def test_a_job_that_ended_without_a_start_has_no_log_to_follow() -> None:
    async def read() -> bytes:
        requests = LogRequests(lambda node, frame: True)
        where = LogLocation(None, True, "job 7 has not started: cancelled")
        return b"".join([piece async for piece in requests.follow(lambda: where, 7, 0, 1024)])

    assert b"has not started: cancelled" in asyncio.run(asyncio.wait_for(read(), 10))
