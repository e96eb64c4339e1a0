"""An agent and the keeper of a job: whether it answers, and its end, whoever started it."""

from __future__ import annotations

import asyncio
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from phalanx.checkpoint.keeper.messages import Noted, Ping, Pong, ToKeeper, Watch
from phalanx.cluster.protocol.messages import KeeperSilent, LocalFact, WardSealed
from phalanx.control.agent.config import AgentConfig
from phalanx.control.agent.jobs import keeper_watch
from phalanx.control.agent.jobs.keeper_watch import KeeperWatch, is_listened_to
from phalanx.control.agent.jobs.local_job import LocalJob, NodeSettings
from phalanx.control.agent.jobs.start import Processes
from phalanx.control.agent.spawn.zygote_client import ZygoteClient
from tests.checkpoint.waiting import eventually

_LENGTH = struct.Struct("<I")
QUIET_SECONDS = 0.5  # in which nothing is to be told


class PlayedKeeper:
    """Says what it holds, and answers pings while it is awake; later those that came meanwhile."""

    def __init__(self, notes: tuple[Noted, ...] = ()) -> None:
        self.notes = notes
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
            if isinstance(message, Watch):
                for note in self.notes:
                    _say(writer, note)
            if isinstance(message, Ping):
                await self.awake.wait()
                _say(writer, Pong())


def _say(writer: asyncio.StreamWriter, message: Noted | Pong) -> None:
    body = msgspec.msgpack.encode(message)
    writer.write(_LENGTH.pack(len(body)) + body)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_watch, "PING_SECONDS", 0.02)
    monkeypatch.setattr(keeper_watch, "LEAST_SECONDS", 0.2)


async def watched(path: Path, stops_until: str = "", last: str = "") -> list[str]:
    """What is told of a keeper that stands still until something is told of it, until a last word.

    The watch counts turns, of which a busy machine makes few: nothing here is waited for by time.
    """
    found: list[str] = []

    async def heard(word: str) -> None:
        async with asyncio.timeout(60):
            while word not in found:
                await asyncio.sleep(0.01)

    def told(fact: LocalFact) -> None:
        assert isinstance(fact, KeeperSilent)
        found.append(fact.state)

    keeper = PlayedKeeper()
    server = await asyncio.start_unix_server(keeper.serve, str(path))
    async with server:
        watch = KeeperWatch(path, 1, 0, told, 2.0, lambda: found.append("ended"))
        assert await watch.open(60.0)
        await asyncio.sleep(QUIET_SECONDS)
        if stops_until:
            keeper.awake.clear()
            await heard(stops_until)
            keeper.awake.set()
            await heard(last)
            await asyncio.sleep(QUIET_SECONDS)  # and nothing follows
        watch.close()
        server.close()
    return found


@pytest.mark.usefixtures("hurried")
def test_a_keeper_that_answers_again_is_told_and_stays(tmp_path: Path) -> None:
    assert asyncio.run(watched(tmp_path / "keeper", "silent", "answers")) == ["silent", "answers"]


@pytest.mark.usefixtures("hurried")
def test_a_keeper_that_does_not_answer_any_more_is_replaced(tmp_path: Path) -> None:
    told = asyncio.run(watched(tmp_path / "keeper", "ended", "ended"))
    assert told == ["silent", "replaced", "ended"]


@pytest.mark.usefixtures("hurried")
def test_nothing_is_told_of_a_keeper_that_answers(tmp_path: Path) -> None:
    assert asyncio.run(watched(tmp_path / "keeper")) == []


def test_a_ward_that_restored_again_counts_from_there(tmp_path: Path) -> None:
    """What it sealed before is of a branch that was given up."""
    steps = (20, 10, 11)
    notes = tuple(Noted(rank, 1, step, True) for step in steps for rank in (0, 1))

    async def heard() -> list[int]:
        found: list[int] = []
        last = asyncio.Event()

        def told(fact: LocalFact) -> None:
            assert isinstance(fact, WardSealed)
            found.append(fact.step)
            if fact.step == 11:
                last.set()

        path = tmp_path / "keeper"
        async with await asyncio.start_unix_server(PlayedKeeper(notes).serve, str(path)):
            watch = KeeperWatch(path, 1, 2, told, 60.0, lambda: None)
            assert await watch.open(1.0)
            await asyncio.wait_for(last.wait(), 60)
            watch.close()
        return found

    assert asyncio.run(heard()) == [20, 10, 10, 10, 11]


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
