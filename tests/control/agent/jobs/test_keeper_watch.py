"""An agent and the keeper of a job: whether it answers, and its end, whoever started it."""

from __future__ import annotations

import asyncio
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from phalanx.checkpoint.keeper.messages import Ping, Pong, ToKeeper
from phalanx.cluster.protocol.messages import KeeperSilent, LocalFact
from phalanx.control.agent.config import AgentConfig
from phalanx.control.agent.jobs import keeper_watch
from phalanx.control.agent.jobs.keeper_watch import KeeperWatch, is_listened_to
from phalanx.control.agent.jobs.local_job import LocalJob, NodeSettings
from phalanx.control.agent.jobs.start import Processes
from phalanx.control.agent.spawn.zygote_client import ZygoteClient
from tests.checkpoint.waiting import eventually

_LENGTH = struct.Struct("<I")


class PlayedKeeper:
    """Answers pings while it is awake; those that came meanwhile when it wakes up."""

    def __init__(self) -> None:
        self.awake = asyncio.Event()
        self.awake.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decode = msgspec.msgpack.Decoder(ToKeeper).decode
        while True:
            try:
                size = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0]
                message = decode(await reader.readexactly(size))
            except asyncio.IncompleteReadError:
                return
            if isinstance(message, Ping):
                await self.awake.wait()
                body = msgspec.msgpack.encode(Pong())
                writer.write(_LENGTH.pack(len(body)) + body)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_watch, "PING_SECONDS", 0.02)
    monkeypatch.setattr(keeper_watch, "LEAST_SECONDS", 0.2)


async def watched(path: Path, stops: float, seconds: float) -> list[str]:
    """What is told of a keeper that stands still for a time: its states, and its replacement."""
    found: list[str] = []

    def told(fact: LocalFact) -> None:
        assert isinstance(fact, KeeperSilent)
        found.append(fact.state)

    keeper = PlayedKeeper()
    server = await asyncio.start_unix_server(keeper.serve, str(path))
    async with server:
        watch = KeeperWatch(path, 1, 0, told, 2.0, lambda: found.append("ended"))
        assert await watch.open(1.0)
        await asyncio.sleep(0.3)
        keeper.awake.clear()
        await asyncio.sleep(stops)
        keeper.awake.set()
        await asyncio.sleep(seconds)
        watch.close()
        server.close()
    return found


@pytest.mark.usefixtures("hurried")
def test_a_keeper_that_answers_again_is_told_and_stays(tmp_path: Path) -> None:
    assert asyncio.run(watched(tmp_path / "keeper", 0.8, 1.0)) == ["silent", "answers"]


@pytest.mark.usefixtures("hurried")
def test_a_keeper_that_does_not_answer_any_more_is_replaced(tmp_path: Path) -> None:
    assert asyncio.run(watched(tmp_path / "keeper", 4.0, 0.0)) == ["silent", "replaced", "ended"]


@pytest.mark.usefixtures("hurried")
def test_nothing_is_told_of_a_keeper_that_answers(tmp_path: Path) -> None:
    assert asyncio.run(watched(tmp_path / "keeper", 0.0, 0.5)) == []


def test_a_keeper_that_no_zygote_knows_is_ended(tmp_path: Path) -> None:
    local_job = LocalJob(1, tmp_path, tmp_path / "sockets")
    command = [sys.executable, "-m", "phalanx.checkpoint.keeper.process", "--socket"]
    process = subprocess.Popen([*command, str(local_job.keeper_socket)])
    assert eventually(lambda: is_listened_to(local_job.keeper_socket))
    zygote = ZygoteClient(tmp_path / "zygote", tmp_path / "log", lambda end: None)
    place = NodeSettings("node", tmp_path, "127.0.0.1", False, 1, AgentConfig())
    Processes(place, zygote, lambda fact: None).end_keeper(local_job)
    assert process.wait(30) == -9
    assert not is_listened_to(local_job.keeper_socket)
    assert not local_job.keeper_socket.exists()
