"""Thousands of agents in one process: raw WebSockets on loopback, workers that obey at once.

A frame that goes to many agents is decoded once. Heartbeats are spread evenly over their period.
What thousands of nodes would do at the same time, each on its own processor, is done before the
clock starts: making keys, and agreeing on one with the server.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import struct
import time
from collections.abc import Callable

from phalanx import __version__
from phalanx.cluster.node import Node
from phalanx.cluster.protocol.commands import Form, Restore, Stop
from phalanx.cluster.protocol.messages import (
    Applied,
    Heartbeat,
    Holding,
    Inventory,
    Joined,
    NodeSeen,
    Ready,
)
from phalanx.control.server.http.front import Headers, headers_of
from phalanx.control.trust.node_key import (
    AGREEMENT_HEADER,
    NONCE_HEADER,
    SERVER_HEADER,
    NodeClaim,
    NodeKey,
    claim_proof,
)
from phalanx.control.wire import agent_messages as wire

UPGRADE = (
    "GET /v1/agent HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    "Authorization: Bearer {token}\r\n\r\n"
)
TICK_SECONDS = 0.02


def frame(message: object) -> bytes:
    """A masked binary frame (the mask is zero, which is a mask)."""
    data = wire.encode(message)
    if len(data) < 126:
        return struct.pack("!BB4x", 0x82, 0x80 | len(data)) + data
    return struct.pack("!BBH4x", 0x82, 0x80 | 126, len(data)) + data


class LoadAgent(asyncio.Protocol):
    """One agent's connection."""

    __slots__ = ("buffer", "fleet", "index", "jobs", "link", "node", "open", "transport")

    def __init__(self, fleet: LoadFleet, index: int) -> None:
        self.fleet, self.index = fleet, index
        self.node = -1  # its number, from Welcome on
        self.open = False
        self.link = b""  # proves it on its next connections
        self.buffer = b""
        self.jobs: dict[int, int] = {}  # generation by job
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.open, self.buffer = transport, False, b""
        transport.write(UPGRADE.format(token=self.fleet.tokens[self.index]).encode())

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport, self.node = None, -1
        self.fleet.lost(self)

    def data_received(self, data: bytes) -> None:
        self.buffer = self.buffer + data if self.buffer else data
        if not self.open:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            if not self.buffer.startswith(b"HTTP/1.1 101"):
                assert b" 503 " in self.buffer[:20], self.buffer[:300]  # it does not lead yet
                assert self.transport is not None
                self.transport.abort()
                return
            head = headers_of(self.buffer[self.buffer.find(b"\r\n") + 2 : end])
            self.open, self.buffer = True, self.buffer[end + 4 :]
            assert head is not None
            self._register(head)
        while len(self.buffer) >= 2:
            size, start = self.buffer[1], 2
            if size == 126:
                size, start = int.from_bytes(self.buffer[2:4], "big"), 4
            elif size == 127:
                size, start = int.from_bytes(self.buffer[2:10], "big"), 10
            if len(self.buffer) < start + size:
                return
            opcode = self.buffer[0] & 15
            message, self.buffer = self.buffer[start : start + size], self.buffer[start + size :]
            if opcode == 2:
                self._receive(message)

    def send(self, message: object) -> None:
        if self.transport is not None:
            self.transport.write(frame(message))

    def _register(self, head: Headers) -> None:
        node, machine = self.fleet.describe(self.index), self.fleet.machine(self.index)
        nonce, server, agreement = (
            bytes.fromhex(head[name.encode()].decode())
            for name in (NONCE_HEADER, SERVER_HEADER, AGREEMENT_HEADER)
        )
        asked = NodeClaim(nonce, server, node.name, machine)
        known = self.link or self.fleet.agreed_key(self.index, agreement)
        self.send(
            wire.Register(
                node=node,
                machine=machine,
                key=self.fleet.keys[self.index].public,
                proof=claim_proof(known, asked),
                linked=bool(self.link),
                inventory=self._inventory(),
                version=__version__,
                clock_ns=time.time_ns(),
            )
        )

    def _inventory(self) -> Inventory:
        held = tuple(Holding(job, number, "running", 1, 1) for job, number in self.jobs.items())
        return Inventory(1, held)

    def _receive(self, data: bytes) -> None:
        message = self.fleet.decode(data)
        if isinstance(message, wire.Deliver):
            command = message.command
            key = {"sequence": command.sequence, "index": command.index}
            self.send(Applied(node=self.node, **key))
            match command.body:
                case Form(job=job, generation=generation, nodes=nodes) if self.node in nodes:
                    self.jobs[job] = generation
                    told = Joined(node=self.node, job=job, generation=generation)
                    self.fleet.sent_joined(job, generation)
                    self.send(told)
                case Restore(job=job, generation=generation, step=step):
                    self.fleet.got_restore(job, generation)
                    self.send(Ready(node=self.node, job=job, generation=generation, step=step))
                case Stop(job=job):
                    self.jobs.pop(job, None)
                    self.fleet.got_stop(job)
        elif isinstance(message, wire.Welcome):
            self.node, self.link = message.node, message.link
            self.send(NodeSeen(node=self.node, inventory=self._inventory()))
            self.fleet.connected.add(self.index)
        elif isinstance(message, wire.Rejected):
            self.fleet.rejected.append(message.message)

    def beat(self) -> None:
        if self.node >= 0 and self.transport is not None:
            self.transport.write(self.fleet.beat_frame(self.node))


class LoadFleet:
    """All agents, and what they measured."""

    def __init__(self, port: int, count: int, beat_seconds: float) -> None:
        self.port, self.count, self.beat_seconds = port, count, beat_seconds
        self.tokens: list[str] = [""] * count
        self.agents = [LoadAgent(self, index) for index in range(count)]
        self.connected: set[int] = set()
        self.gone: set[int] = set()  # these stay away
        self.forms: dict[tuple[int, int], int] = {}  # nodes that joined, by job and generation
        self.joined_at: dict[tuple[int, int], float] = {}  # when the last one did
        self.restore_seconds: list[float] = []  # from there to the first Restore
        self.stopped_at: dict[int, float] = {}
        self.reconnect = True
        self._cache: dict[bytes, object] = {}
        self._beats: dict[int, bytes] = {}
        seeds = (hashlib.sha256(index.to_bytes(4, "big")).digest() for index in range(count))
        self.keys = [NodeKey(seed) for seed in seeds]
        self._agreed: tuple[bytes, list[bytes]] = (b"", [])  # with the server of that public key
        self.rejected: list[str] = []
        self._connecting: set[asyncio.Task[None]] = set()
        self.late_seconds = 0.0  # of the slowest tick of this process itself

    def describe(self, index: int) -> Node:
        leaf, pod = f"leaf-{index // 32}", f"pod-{index // 1024}"
        return Node(name=f"node-{index:05d}", gpus=8, kind="h100", leaf=leaf, pod=pod)

    def machine(self, index: int) -> str:
        return f"machine-{index:05d}"

    def agreed_key(self, index: int, server: bytes) -> bytes:
        """What a node and the server know; the first one who asks makes those of all."""
        if self._agreed[0] != server:
            self._agreed = server, [key.agree(server) for key in self.keys]
        return self._agreed[1][index]

    async def connect_first(self) -> None:
        """One agent, which learns the server's key for all."""
        await self.connect(self.agents[0])
        await self.until(lambda: 0 in self.connected, 60)

    def decode(self, data: bytes) -> object:
        found = self._cache.get(data)
        if found is None:
            found = wire.decode_down(data)
            if isinstance(found, wire.Signed):
                found = wire.decode_down(found.order)
            if len(self._cache) > 500:
                self._cache.clear()
            self._cache[data] = found
        return found

    def beat_frame(self, node: int) -> bytes:
        found = self._beats.get(node)
        if found is None:
            found = self._beats[node] = frame(Heartbeat(node=node, incarnation=1))
        return found

    def sent_joined(self, job: int, generation: int) -> None:
        key = (job, generation)
        self.forms[key] = self.forms.get(key, 0) + 1
        self.joined_at[key] = time.monotonic()

    def got_restore(self, job: int, generation: int) -> None:
        at = self.joined_at.pop((job, generation), None)
        if at is not None:
            self.restore_seconds.append(time.monotonic() - at)

    def got_stop(self, job: int) -> None:
        self.stopped_at.setdefault(job, time.monotonic())

    def lost(self, agent: LoadAgent) -> None:
        self.connected.discard(agent.index)
        if self.reconnect and agent.index not in self.gone:
            # As real agents do: at once, but not all in the same moment.
            pause = 0.2 + 1.5 * int.from_bytes(os.urandom(2), "big") / 65536
            asyncio.get_running_loop().call_later(pause, self._again, agent)

    def _again(self, agent: LoadAgent) -> None:
        task = asyncio.ensure_future(self.connect(agent))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def connect(self, agent: LoadAgent) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: agent, "127.0.0.1", self.port)
        except OSError:
            self.lost(agent)

    async def connect_all(self, at_once: int = 1000) -> None:
        """Connects everybody, so many at a time."""
        limit = asyncio.Semaphore(at_once)

        async def one(agent: LoadAgent) -> None:
            async with limit:
                await self.connect(agent)
                while agent.index not in self.connected:
                    await asyncio.sleep(0.01)

        waiting = [agent for agent in self.agents if agent.index not in self.connected]
        await asyncio.gather(*map(one, waiting))

    async def until(self, true: Callable[[], bool], seconds: float) -> float:
        """Waits for something; returns how long it took."""
        began = time.monotonic()
        while not true():
            assert time.monotonic() - began < seconds, "it took too long"
            await asyncio.sleep(0.01)
        return time.monotonic() - began

    async def beat(self) -> None:
        """Heartbeats of everybody, evenly, until it is cancelled."""
        following, began, sent = 0, time.monotonic(), 0
        while True:
            await asyncio.sleep(TICK_SECONDS)
            due = int((time.monotonic() - began) * self.count / self.beat_seconds) - sent
            self.late_seconds = max(self.late_seconds, due * self.beat_seconds / self.count)
            sent += due
            for _ in range(min(due, self.count)):
                self.agents[following].beat()
                following = (following + 1) % self.count
