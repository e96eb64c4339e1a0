"""The store where the ranks of gangs meet, open to nobody who does not know a gang's secret.

A node hosts one for all gangs whose first rank it has. Ranks speak to it with torch's own
``TCPStore``; torch's own server would show every key to whoever connects. Here each key begins with
the secret of its generation (:func:`meeting_name`, which only the nodes of the gang can derive), no
request reaches keys of another one, and what a generation left behind is dropped once nobody who
used it is connected.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import resource
import socket
import struct
from collections.abc import Generator
from contextlib import suppress
from enum import IntEnum
from pathlib import Path

from phalanx.control.agent.tasks import Tasks

MOST_BYTES = 16 << 20  # of one key or value, and of all that one connection stores
MOST_KEYS = 1 << 20  # in one request
NAME_SECONDS = 60.0  # until a connection must have named a meeting
KEPT_SECONDS = 1800.0  # that a meeting outlives its last connection
SWEEP_SECONDS = 60.0
QUIET_SECONDS = 10.0  # between two lines about clients that are refused
NAME = re.compile(rb"/([0-9a-f]{32})/")
MAGIC = 0x3C85F7CE  # torch's clients begin with it
SIZE, NUMBER, WORD = struct.Struct("<Q"), struct.Struct("<q"), struct.Struct("<I")

log = logging.getLogger("phalanx.rendezvous")

Parser = Generator[int, bytes, None]  # asks for so many bytes at a time


class Query(IntEnum):
    """What a client of torch's can ask for."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    COUNT_KEYS = 7
    DELETE = 8
    APPEND = 9
    GET_MANY = 10
    SET_MANY = 11
    CANCEL_WAIT = 12
    PING = 13
    LIST_KEYS = 17


READY, NOT_READY = b"\0", b"\1"
STOP_WAITING, WAIT_CANCELED = b"\0", b"\1"


class RequestRefusedError(Exception):
    """A client asked for what it may not have, or does not speak the protocol."""


def meeting_name(key: bytes, job: int, generation: int) -> str:
    """The secret under which the ranks of a generation meet, from the job's key."""
    return hmac.digest(key, f"rendezvous {job} {generation}".encode(), "sha256").hex()[:32]


async def publish(store: str, meeting: str, key: str, value: str) -> None:
    """Set a key of a meeting, as a rank's client would; returns when the store has it."""
    host, _, port = store.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        name, content = f"/{meeting}/{key}".encode(), value.encode()
        sized = [SIZE.pack(len(each)) + each for each in (name, content)]
        writer.write(bytes([Query.VALIDATE]) + WORD.pack(MAGIC))
        writer.write(bytes([Query.SET]) + sized[0] + sized[1])
        writer.write(bytes([Query.CHECK]) + SIZE.pack(1) + sized[0])
        if await reader.readexactly(1) != READY:
            raise OSError(f"the store at {store} does not keep {key}")
    except asyncio.IncompleteReadError as error:
        raise OSError(f"the store at {store} hung up") from error
    finally:
        writer.close()


class GenerationStore:
    """The keys of one generation of a gang."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.waiting: dict[bytes, set[ClientSession]] = {}
        self.users = 0  # connections that named it
        self.left = 0.0  # when the last one went

    def set(self, key: bytes, value: bytes) -> None:
        """A key has a value; whoever waits for it is told."""
        self.values[key] = value
        for each in self.waiting.pop(key, ()):
            each.come(key)


class Rendezvous:
    """All meetings of a node."""

    def __init__(self) -> None:
        self.meetings: dict[bytes, GenerationStore] = {}
        self.loop = asyncio.get_running_loop()
        self._refused = 0  # clients since the last line about them
        self._said = float("-inf")

    def refused(self, peer: object, error: RequestRefusedError) -> None:
        """Tells of a client that is sent away, now and then: strangers do not fill the log."""
        self._refused += 1
        if self.loop.time() - self._said >= QUIET_SECONDS:
            log.warning("%s is refused: %s (%d since the last line)", peer, error, self._refused)
            self._said, self._refused = self.loop.time(), 0

    def named(self, name: bytes) -> GenerationStore:
        """The meeting of a name, which may be new."""
        if name not in self.meetings:
            self.meetings[name] = GenerationStore()
        return self.meetings[name]

    async def sweep(self) -> None:
        """Drops what nobody will come back to."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.forget(self.loop.time() - KEPT_SECONDS)

    def forget(self, left_before: float) -> None:
        """Drops the meetings whose last visitor went before that time."""
        for name, meeting in list(self.meetings.items()):
            if not meeting.users and meeting.left < left_before:
                del self.meetings[name]


class ClientSession(asyncio.Protocol):
    """One client."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._all = rendezvous
        self._named: dict[bytes, GenerationStore] = {}
        self._awaited: set[bytes] = set()
        self._stored = 0
        self._buffer = bytearray()
        self._paused = False
        self._parser = self._converse()
        self._needed = next(self._parser)

    # Of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        with suppress(OSError):
            sock = transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._deadline = self._all.loop.call_later(NAME_SECONDS, self._end_if_unnamed)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._parse()

    def pause_writing(self) -> None:  # it asks and does not read the answers
        self._paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        self._transport.resume_reading()
        self._parse()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        self._stop_waiting()
        for meeting in self._named.values():
            meeting.users -= 1
            meeting.left = self._all.loop.time()

    # What a client says.

    def _parse(self) -> None:
        buffer, read = self._buffer, 0
        try:
            while not self._paused and len(buffer) - read >= self._needed:
                end = read + self._needed
                part = bytes(buffer[read:end])
                read = end
                self._needed = self._parser.send(part)
        except RequestRefusedError as error:
            self._all.refused(self._transport.get_extra_info("peername"), error)
            self._transport.abort()
            buffer.clear()
            read, self._needed = 0, MOST_BYTES
        del buffer[:read]

    def _converse(self) -> Parser:
        while True:
            request_type = (yield 1)[0]
            if request_type == Query.SET:
                key = yield from self._string()
                self._set(key, (yield from self._string()))
            elif request_type == Query.GET:
                key = yield from self._string()
                self._answer(self._meeting(key).values.get(key, b""))
            elif request_type == Query.WAIT:
                self._wait((yield from self._keys()))
            elif request_type == Query.ADD:
                key = yield from self._string()
                self._add(key, NUMBER.unpack((yield 8))[0])
            elif request_type == Query.CHECK:
                keys = yield from self._keys()
                there = all(key in self._meeting(key).values for key in keys)
                self._transport.write(READY if there else NOT_READY)
            else:
                yield from self._rarely(request_type)

    def _rarely(self, kind: int) -> Parser:
        match kind:
            case Query.VALIDATE:
                if WORD.unpack((yield 4))[0] != MAGIC:
                    raise RequestRefusedError("it does not speak the protocol of torch's TCPStore")
            case Query.PING:
                self._transport.write((yield 4))
            case Query.COMPARE_SET:
                key = yield from self._string()
                expected = yield from self._string()
                self._compare_set(key, expected, (yield from self._string()))
            case Query.DELETE:
                key = yield from self._string()
                gone = self._meeting(key).values.pop(key, None)
                self._transport.write(NUMBER.pack(int(gone is not None)))
            case Query.APPEND:
                key = yield from self._string()
                more = yield from self._string()
                self._set(key, self._meeting(key).values.get(key, b"") + more)
            case Query.GET_MANY:
                for key in (yield from self._keys()):
                    self._answer(self._meeting(key).values.get(key, b""))
                    yield 0  # nothing more is asked for, but the answer may have to be read first
            case Query.SET_MANY:
                for _ in range((yield from self._count())):
                    key = yield from self._string()
                    self._set(key, (yield from self._string()))
            case Query.CANCEL_WAIT:
                self._stop_waiting()
                self._transport.write(WAIT_CANCELED)
            case Query.COUNT_KEYS:
                self._transport.write(NUMBER.pack(len(self._own_keys())))
            case Query.LIST_KEYS:
                keys = self._own_keys()
                self._transport.write(SIZE.pack(len(keys)))
                for key in keys:
                    self._answer(key)
                    yield 0
            case _:
                raise RequestRefusedError(f"request {kind} is not known here")

    def _count(self) -> Generator[int, bytes, int]:
        count: int = SIZE.unpack((yield 8))[0]
        if count > MOST_KEYS:
            raise RequestRefusedError(f"{count} keys in one request")
        return count

    def _string(self) -> Generator[int, bytes, bytes]:
        size: int = SIZE.unpack((yield 8))[0]
        if size > MOST_BYTES:
            raise RequestRefusedError(f"{size} bytes in one value")
        return (yield size) if size else b""

    def _keys(self) -> Generator[int, bytes, list[bytes]]:
        keys, size = [], 0
        for _ in range((yield from self._count())):
            keys.append((yield from self._string()))
            size += len(keys[-1])
            if size > MOST_BYTES:
                raise RequestRefusedError(f"more than {MOST_BYTES} bytes of keys in one request")
        return keys

    # What is done with it.

    def _meeting(self, key: bytes) -> GenerationStore:
        """The meeting that a key is of."""
        name = key[1:33]
        meeting = self._named.get(name)
        if meeting is None:
            if NAME.match(key) is None:
                raise RequestRefusedError("its keys name no meeting")
            meeting = self._named[name] = self._all.named(name)
            meeting.users += 1
            self._deadline.cancel()
        return meeting

    def _set(self, key: bytes, value: bytes) -> None:
        meeting = self._meeting(key)
        held = meeting.values.get(key)
        self._stored += len(value) + (len(key) if held is None else -len(held))
        if self._stored > MOST_BYTES:
            raise RequestRefusedError(f"more than {MOST_BYTES} bytes stored")
        meeting.set(key, value)

    def _add(self, key: bytes, amount: int) -> None:
        try:
            total = int(self._meeting(key).values.get(key, b"0")) + amount
            answer = NUMBER.pack(total)
        except (ValueError, struct.error) as error:
            raise RequestRefusedError(f"it adds to what is no number: {error}") from error
        self._set(key, str(total).encode())
        self._transport.write(answer)

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> None:
        held = self._meeting(key).values.get(key)
        if held == expected or (held is None and not expected):
            self._set(key, desired)
            held = desired
        self._answer(expected if held is None else held)

    def _wait(self, keys: list[bytes]) -> None:
        self._stop_waiting()
        for key in keys:
            meeting = self._meeting(key)
            if key not in meeting.values:
                self._awaited.add(key)
                meeting.waiting.setdefault(key, set()).add(self)
        if not self._awaited:
            self._transport.write(STOP_WAITING)

    def come(self, key: bytes) -> None:
        """A key that this client waits for is there."""
        self._awaited.discard(key)
        if not self._awaited:
            self._transport.write(STOP_WAITING)

    def _stop_waiting(self) -> None:
        for key in self._awaited:
            waiting = self._meeting(key).waiting
            waiting[key].discard(self)
            if not waiting[key]:
                del waiting[key]
        self._awaited.clear()

    def _own_keys(self) -> list[bytes]:
        return [key for meeting in self._named.values() for key in meeting.values]

    def _answer(self, value: bytes) -> None:
        self._transport.write(SIZE.pack(len(value)) + value)

    def _end_if_unnamed(self) -> None:
        if not self._named:
            self._transport.abort()


def host(listening: socket.socket) -> None:
    """Be the store of a node, until somebody ends this process."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with suppress(OSError):  # whoever floods it ends it, and the agent starts another
        Path("/proc/self/oom_score_adj").write_text("1000")
    asyncio.run(_serve(listening))


async def _serve(listening: socket.socket) -> None:
    rendezvous = Rendezvous()
    tasks = Tasks()
    tasks.later(rendezvous.sweep())
    server = await rendezvous.loop.create_server(
        lambda: ClientSession(rendezvous), sock=listening, backlog=4096
    )
    async with server:
        await server.serve_forever()
