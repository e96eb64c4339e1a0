"""Whatever a peer sends (agent, worker, zygote, keeper, shell): the receiver refuses and lives."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from phalanx.checkpoint.keeper import wire as keeper_wire
from phalanx.checkpoint.keeper.frames import LENGTH, Unframer
from phalanx.checkpoint.keeper.messages import FromKeeper, ToKeeper
from phalanx.cluster.protocol.agent_machine import Agent
from phalanx.cluster.protocol.commands import Command
from phalanx.cluster.protocol.messages import LocalFact
from phalanx.control.agent.jobs.local_job import LocalJob
from phalanx.control.agent.jobs.worker_events import WorkerEvents
from phalanx.control.agent.spawn.zygote import Zygote
from phalanx.control.wire import agent_messages as wire
from phalanx.control.wire import worker_messages as worker_link
from phalanx.control.wire import zygote_messages as zygote_wire
from phalanx.control.wire.websocket_frames import FrameError, Frames
from tests.control.servers import WORK, PlayedAgent, ServerProcess
from tests.examples import examples
from tests.security.values import HOSTILE, of_type

UNREADABLE = (ValueError, RecursionError)  # of which all errors of decoders are
DECODERS: dict[str, tuple[Callable[[bytes], Any], Any]] = {
    "agent to server": (wire.decode_up, wire.Up),
    "server to agent": (wire.decode_down, wire.Down),
    "worker to agent": (worker_link.decode_fact, worker_link.Fact),
    "agent to worker": (worker_link.decode_order, worker_link.Order),
    "agent to zygote": (zygote_wire.decode_to_zygote, zygote_wire.ToZygote),
    "zygote to agent": (zygote_wire.decode_from_zygote, zygote_wire.FromZygote),
    "worker to keeper": (keeper_wire._to_keeper.decode, ToKeeper),
    "keeper to worker": (keeper_wire.from_keeper.decode, FromKeeper),
}


def packed(value: Any) -> bytes:
    """A value as msgpack, as far as that has numbers so large; keys of digits are numbers."""
    return msgspec.msgpack.encode(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {int(k) if k.isdecimal() else k: _plain(each) for k, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return float(value)
    return value


def messages_of(kind: Any) -> Any:
    """Bytes: mostly messages of a type with any values in them, some garbage."""
    good = of_type(kind).map(packed)
    return st.one_of(good, good, good, HOSTILE.map(packed), st.binary(max_size=60))


def aimed(value: Any) -> Any:
    """A message of the first node about the first job, which does not end the connection."""
    if isinstance(value, dict):
        told = {"node": 0, "job": 1, "generation": 1}
        return {k: told[k] if k in told and isinstance(v, int) else v for k, v in value.items()}
    return value


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_refuses_what_it_cannot_read(name: str) -> None:
    decode, kind = DECODERS[name]

    @examples(60)
    @given(messages_of(kind))
    def try_one(data: bytes) -> None:
        with suppress(*UNREADABLE):
            decode(data)

    try_one()
    with suppress(*UNREADABLE):
        decode(b"\x91" * 200_000 + b"\x01")


@examples(150)
@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(1, 9))
def test_frames_of_agents_are_whole_or_refused(parts: list[bytes], piece: int) -> None:
    taken: list[bytes] = []
    frames = Frames(lambda _, payload: taken.append(payload), 1 << 10)
    sent = b""
    for part in parts:  # every second one is a frame, the others garbage
        sent += (
            part if len(part) % 2 else struct.pack("!BB4s", 0x82, 0x80 | len(part), bytes(4)) + part
        )
    with suppress(FrameError):
        for at in range(0, len(sent), piece):
            frames.feed(sent[at : at + piece])


@examples(60)
@given(st.lists(messages_of(zygote_wire.FromZygote), max_size=5), st.binary(max_size=20))
def test_messages_with_a_length_are_whole_or_refused(bodies: list[bytes], rest: bytes) -> None:
    sent = b"".join(LENGTH.pack(len(body)) + body for body in bodies)
    unframer = Unframer()
    with suppress(ValueError):
        found = [body for at in range(0, len(sent), 7) for body in unframer.feed(sent[at : at + 7])]
        assert found == bodies
        unframer.feed(rest)


def test_a_keeper_takes_no_message_that_is_too_long() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(struct.pack("<I", 0xFFFFFFFF) + b"x" * 100)
        assert keeper_wire.receive_by_keeper(ours) == (None, [])


@examples(60)
@given(messages_of(ToKeeper), st.booleans())
def test_a_keeper_refuses_what_it_cannot_read(body: bytes, cut: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(struct.pack("<I", len(body) + cut) + body)
        theirs.shutdown(socket.SHUT_WR)
        with suppress(*UNREADABLE):
            keeper_wire.receive_by_keeper(ours)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.one_of(HOSTILE.map(packed), st.binary(max_size=60)))
def test_a_zygote_parts_with_whoever_sends_nonsense(tmp_path: Path, body: bytes) -> None:
    ours, theirs = socket.socketpair()
    listener = socket.socket(socket.AF_UNIX)
    zygote = Zygote(listener, str(tmp_path / "zygote"))
    zygote._agent = ours
    zygote._selector.register(ours, 1)
    with listener, theirs:
        theirs.sendall(LENGTH.pack(len(body)) + body)
        zygote._listen()
        assert zygote._agent is None and not zygote._leaving


def test_an_agent_hears_whatever_workers_say(tmp_path: Path) -> None:
    facts: list[Any] = []
    complaints: list[str] = []

    async def speak(bodies: list[bytes]) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, told: complaints.append(str(told)))
        worker_events = WorkerEvents(
            facts.append, lambda local_job, pid: pid, lambda local_job, process: None
        )
        local_job = LocalJob(1, tmp_path, tmp_path)

        async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await worker_events._meet(local_job, reader, writer)

        path = str(tmp_path / "agent.sock")
        Path(path).unlink(missing_ok=True)
        server = await asyncio.start_unix_server(meet, path)
        for body in bodies:
            reader, writer = await asyncio.open_unix_connection(path)
            with suppress(OSError):
                writer.write(LENGTH.pack(len(body)) + body)
                writer.write_eof()
                await reader.read()
            writer.close()
        server.close()

    @examples(25)
    @given(st.lists(messages_of(worker_link.Fact), min_size=1, max_size=6))
    def talk(bodies: list[bytes]) -> None:
        asyncio.run(speak(bodies))

    talk()
    assert complaints == []


def test_the_machine_of_an_agent_bears_whatever_happens() -> None:
    """Facts of workers and commands of a server: any values, in any order."""
    known = (LocalFact, Command)

    @examples(150)
    @given(st.lists(st.one_of([of_type(kind).map(aimed) for kind in known]), max_size=20))
    def happen(values: list[Any]) -> None:
        agent = Agent(0, 60 * 10**9, 5 * 10**9)
        for number, value in enumerate(values):
            for kind in known:
                with suppress(*UNREADABLE):
                    fact = msgspec.convert(_plain(value), kind)
                    agent.handle(fact, number * 10**9)
                    break

    happen()


class FuzzedHub:
    """A server that one connected agent tells anything, killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.server = ServerProcess(folder / "state", "--requests-per-second", "0").start()
        join = (self.server.state / "join.token").read_text().strip()
        self.agent = PlayedAgent([self.server.url], join, "n0", gpus=8)

    async def speak(self, bodies: list[bytes]) -> None:
        """One connection: a proper register, then these words."""
        if not self.agent.token:
            await self.agent.join(self.server.url)
        address = self.server.url.replace("http", "ws", 1) + wire.AGENT_PATH
        headers = {"Authorization": f"Bearer {self.agent.token}"}
        async with connect(address, additional_headers=headers, compression=None) as opened:
            await opened.send(wire.encode(self.register()))
            with suppress(ConnectionClosed):
                await opened.recv()
                for body in bodies:
                    await opened.send(body)
                await (await opened.ping())

    def register(self) -> wire.Register:
        from phalanx import __version__
        from phalanx.cluster.protocol.messages import Inventory

        return wire.Register(
            node=self.agent.node,
            machine=self.agent.machine,
            inventory=Inventory(),
            version=__version__,
            clock_ns=time.time_ns(),
        )

    def round(self, number: int, examples: int) -> None:
        right = of_type(wire.Up).map(aimed).map(packed)
        words = st.one_of(*[right] * 8, messages_of(wire.Up))
        spec = {"name": "j", "gang": {"slot_gpus": 8}}
        self.server.call("POST", "/v1/jobs", {"spec": spec, "work": WORK})

        @seed(number)
        @settings(max_examples=examples, deadline=None, database=None)
        @given(st.lists(words, min_size=1, max_size=30))
        def some(bodies: list[bytes]) -> None:
            with suppress(ConnectionClosed):
                asyncio.run(self.speak(bodies))

        some()
        self.check()
        self.server.kill()
        self.server.start()
        self.check()

    def check(self) -> None:
        assert self.server.call("GET", "/v1/status")[0] == 200
        text = self.server.call("GET", "/metrics")[1]
        assert "phalanx_server_faults_total{" not in text, self.server.output()[-6000:]
        assert "Traceback" not in self.server.output(), self.server.output()[-6000:]


@pytest.mark.timeout(200)
def test_a_server_starts_again_after_whatever_an_agent_said(tmp_path: Path) -> None:
    fuzzed = FuzzedHub(tmp_path)
    try:
        fuzzed.round(1, 15)
    finally:
        fuzzed.server.kill()


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_a_server_starts_again_after_ten_minutes_of_agents_words(tmp_path: Path) -> None:
    fuzzed, until, number = FuzzedHub(tmp_path), time.monotonic() + 600, 1
    try:
        while time.monotonic() < until:
            number += 1
            fuzzed.round(number, 100)
    finally:
        fuzzed.server.kill()
