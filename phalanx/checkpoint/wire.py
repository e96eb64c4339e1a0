"""What a worker and its keeper say to each other over a Unix socket."""

from __future__ import annotations

import socket
import struct

import msgspec

from phalanx.checkpoint.commit import Order

_LENGTH = struct.Struct("<I")


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A worker asks for memory: ``slots`` snapshots of ``slot_bytes`` each."""

    rank: int
    slot_bytes: int
    slots: int


class Flush(msgspec.Struct, frozen=True, tag=True):
    """A sealed snapshot: write it. The slot is the keeper's until it answers."""

    slot: int
    order: Order


class Bye(msgspec.Struct, frozen=True, tag=True):
    """The worker ends as planned; what it handed over is still written."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The memory asked for comes as a file descriptor with this message."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """There is no such memory, and why."""

    problem: str


class Durable(msgspec.Struct, frozen=True, tag=True):
    """This rank's shard is on disk and its slot is free."""

    slot: int
    step: int
    seconds: float


class Committed(msgspec.Struct, frozen=True, tag=True):
    """The checkpoint of a step is complete."""

    step: int
    path: str


class Superseded(msgspec.Struct, frozen=True, tag=True):
    """A newer checkpoint was complete, and this one cleared away, before anybody looked."""

    step: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A snapshot could not be written or committed; ``slot`` is free, or -1."""

    slot: int
    step: int
    path: str
    problem: str


FromWorker = Hello | Flush | Bye
FromKeeper = Welcome | Refused | Durable | Committed | Superseded | Failed

_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_from_keeper: msgspec.msgpack.Decoder[FromKeeper] = msgspec.msgpack.Decoder(FromKeeper)


def send(connection: socket.socket, message: FromWorker | FromKeeper, *files: int) -> None:
    """Send one message, with file descriptors where there are any."""
    body = msgspec.msgpack.encode(message)
    frame = _LENGTH.pack(len(body)) + body
    if files:
        frame = frame[socket.send_fds(connection, [frame], list(files)) :]
    connection.sendall(frame)


def receive_from_worker(connection: socket.socket) -> FromWorker | None:
    """The worker's next message; None when it is gone."""
    body = _receive(connection)
    return None if body is None else _from_worker.decode(body)


class KeeperStream:
    """The keeper's messages, whole, out of a stream that may stop anywhere."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = b""

    def welcome(self) -> tuple[FromKeeper | None, list[int]]:
        """The answer to Hello, with the memory."""
        data, files, _, _ = socket.recv_fds(self._connection, 1 << 16, 1)
        self._rest = data
        messages = self.take()
        while data and not messages:
            data = self._connection.recv(1 << 16)
            self._rest += data
            messages = self.take()
        return (messages[0] if messages else None), files

    def read(self, timeout_seconds: float | None) -> list[FromKeeper]:
        """What has arrived; waits for something if there is time. EOFError: the keeper is gone."""
        self._connection.settimeout(timeout_seconds)
        try:
            data = self._connection.recv(1 << 16)
        except (BlockingIOError, TimeoutError):
            return []
        except ConnectionResetError:
            data = b""
        finally:
            self._connection.settimeout(None)
        if not data:
            raise EOFError
        self._rest += data
        return self.take()

    def take(self) -> list[FromKeeper]:
        """The whole messages received so far."""
        found = []
        while len(self._rest) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._rest)[0]
            if len(self._rest) < end:
                break
            found.append(_from_keeper.decode(self._rest[_LENGTH.size : end]))
            self._rest = self._rest[end:]
        return found


def _receive(connection: socket.socket) -> bytes | None:
    head = _exactly(connection, _LENGTH.size)
    return None if head is None else _exactly(connection, _LENGTH.unpack(head)[0])


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = []
    while count:
        try:
            part = connection.recv(min(count, 1 << 20))
        except ConnectionResetError:
            return None
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
