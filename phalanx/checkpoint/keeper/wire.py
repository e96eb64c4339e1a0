"""How workers and keepers speak: over a Unix socket, keepers among themselves by TCP.

A message is a length and msgpack; bytes of a snapshot follow theirs bare.
"""

from __future__ import annotations

import select
import socket
from typing import TypeVar

import msgspec

from phalanx.checkpoint.keeper.channel import ByteStream
from phalanx.checkpoint.keeper.frames import LENGTH, MOST_BYTES, Unframer, framed
from phalanx.checkpoint.keeper.messages import FromKeeper, Refused, ToKeeper

T = TypeVar("T")

_to_keeper: msgspec.msgpack.Decoder[ToKeeper] = msgspec.msgpack.Decoder(ToKeeper)
from_keeper: msgspec.msgpack.Decoder[FromKeeper] = msgspec.msgpack.Decoder(FromKeeper)


def send_together(connection: ByteStream, *messages: FromKeeper) -> None:
    """Send several messages at once: whoever waits for them wakes up once."""
    connection.sendall(b"".join(map(framed, messages)))


def send(connection: ByteStream, message: ToKeeper | FromKeeper, *files: int) -> None:
    """Send one message, with file descriptors where there are any."""
    frame = framed(message)
    if files:
        assert isinstance(connection, socket.socket)
        frame = frame[socket.send_fds(connection, [frame], list(files)) :]
    connection.sendall(frame)


def receive_by_keeper(connection: socket.socket) -> tuple[ToKeeper | None, list[int]]:
    """The next message to a keeper, with descriptors that came along; None when it is gone."""
    try:
        head, files, _, _ = socket.recv_fds(connection, LENGTH.size, 1)
    except OSError:
        return None, []
    rest = receive_bytes(connection, LENGTH.size - len(head)) if head else None
    body = None if rest is None else _receive_body(connection, head + rest)
    return (None if body is None else _to_keeper.decode(body)), list(files)


def receive_by_peer(connection: ByteStream) -> ToKeeper | None:
    """The next message to a keeper from another node; None when it is gone."""
    head = receive_bytes(connection, LENGTH.size)
    body = None if head is None else _receive_body(connection, head)
    return None if body is None else _to_keeper.decode(body)


def _receive_body(connection: ByteStream, head: bytes) -> bytes | None:
    """A message behind its length; one that is too long is no message, and ends the connection."""
    size = LENGTH.unpack(head)[0]
    return receive_bytes(connection, size) if size <= MOST_BYTES else None


def ask(connection: ByteStream, message: ToKeeper, answer_type: type[T]) -> T:
    """The keeper's answer of the kind that belongs to a question; ConnectionError otherwise."""
    send(connection, message)
    return expect(connection, answer_type)


def expect(connection: ByteStream, answer_type: type[T]) -> T:
    """The next message, which is of this kind or an error."""
    head = receive_bytes(connection, LENGTH.size)
    body = None if head is None else _receive_body(connection, head)
    answer = None if body is None else from_keeper.decode(body)
    if isinstance(answer, answer_type):
        return answer
    problem = answer.problem if isinstance(answer, Refused) else "no answer"
    raise ConnectionError(f"the keeper does not help: {problem}")


class KeeperStream:
    """The keeper's messages, whole, out of a stream that may stop anywhere."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unframer = Unframer()

    def welcome(self) -> tuple[FromKeeper | None, list[int]]:
        """The answer to Hello, with the memory."""
        data, files, _, _ = socket.recv_fds(self._connection, 1 << 16, 1)
        messages = self._take(data)
        while data and not messages:
            data = self._connection.recv(1 << 16)
            messages = self._take(data)
        return (messages[0] if messages else None), files

    def read(self, timeout_seconds: float | None) -> list[FromKeeper]:
        """What has arrived; waits for something if there is time. EOFError: the keeper is gone."""
        # A timeout of the socket would hold for a thread that sends meanwhile, too.
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if not poll.poll(None if timeout_seconds is None else 1000 * timeout_seconds):
            return []
        try:
            data = self._connection.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError
        return self._take(data)

    def _take(self, data: bytes) -> list[FromKeeper]:
        return [from_keeper.decode(body) for body in self._unframer.feed(data)]


def receive_bytes(connection: ByteStream, count: int) -> bytes | None:
    """Exactly ``count`` bytes; None when the other side is gone."""
    buffer = bytearray(count)
    return bytes(buffer) if receive_into(connection, memoryview(buffer)) else None


def receive_into(connection: ByteStream, buffer: memoryview) -> bool:
    """Fill a buffer; False when the other side is gone before."""
    done = 0
    while done < len(buffer):
        try:
            count = connection.recv_into(buffer[done:])
        except OSError:
            return False
        if count == 0:
            return False
        done += count
    return True
