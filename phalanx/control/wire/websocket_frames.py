"""WebSocket frames (RFC 6455) of agents: whole binary messages, as little work a message as can be.

A fleet that comes back after a restart is thousands of handshakes and messages in a second or two;
a general library's objects, checks and copies for each of them would be most of that time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from websockets import utils

try:
    from websockets.speedups import apply_mask
except ImportError:  # a platform without the compiled part
    apply_mask = utils.apply_mask

BINARY = 0x82  # a whole message in one frame
CONTINUED, TEXT, BYTES, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
NO_MASK = bytes(4)

PROTOCOL_ERROR, NOT_TAKEN, TOO_LARGE = 1002, 1003, 1009


class FrameError(Exception):
    """What a peer sent cannot be taken; ``code`` as in a close frame."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class Frames:
    """Takes bytes as they come and gives ``(opcode, payload)`` of whole messages to ``take``."""

    __slots__ = ("_buffer", "_most", "_parts", "_take")

    def __init__(self, take: Callable[[int, bytes], None], most_bytes: int) -> None:
        self._take, self._most = take, most_bytes
        self._buffer = bytearray()
        self._parts: list[bytes] | None = None  # of a message that came in several frames

    def feed(self, data: bytes) -> None:
        """More bytes; FrameError where they break the protocol."""
        if self._buffer:
            self._buffer += data
            used = self._parse(self._buffer)
            del self._buffer[:used]
        else:
            used = self._parse(data)
            if used < len(data):
                self._buffer += data[used:]

    def _parse(self, data: bytes | bytearray) -> int:
        at, size = 0, len(data)
        while size - at >= 6:
            length, start = data[at + 1], at + 2
            if length < 0x80:
                raise FrameError(PROTOCOL_ERROR, "a frame of a client must be masked")
            length -= 0x80
            if length == 126:
                length, start = int.from_bytes(data[start : start + 2], "big"), start + 2
            elif length == 127:
                if size - at < 10:
                    break
                length, start = int.from_bytes(data[start : start + 8], "big"), start + 8
            if length > self._most:
                raise FrameError(TOO_LARGE, f"at most {self._most} bytes are taken")
            end = start + 4 + length
            if end > size:
                break
            mask, payload = bytes(data[start : start + 4]), bytes(data[start + 4 : end])
            self._frame(data[at], payload if mask == NO_MASK else apply_mask(payload, mask))
            at = end
        return at

    def _frame(self, first: int, payload: bytes) -> None:
        if first == BINARY and self._parts is None:
            self._take(BYTES, payload)
            return
        opcode, whole = first & 0x0F, first & 0x80
        if first & 0x70:
            raise FrameError(PROTOCOL_ERROR, "no extension was agreed on")
        if opcode in (CLOSE, PING, PONG):
            if not whole or len(payload) > 125:
                raise FrameError(PROTOCOL_ERROR, "a control frame is whole and short")
            self._take(opcode, payload)
        elif opcode == TEXT:
            raise FrameError(NOT_TAKEN, "messages are binary")
        elif opcode == BYTES and self._parts is None:
            self._parts = [payload]
        elif opcode == CONTINUED and self._parts is not None:
            self._parts.append(payload)
            if sum(map(len, self._parts)) > self._most:
                raise FrameError(TOO_LARGE, f"at most {self._most} bytes are taken")
            if whole:
                message, self._parts = b"".join(self._parts), None
                self._take(BYTES, message)
        else:
            raise FrameError(PROTOCOL_ERROR, "a frame that does not follow from the one before")


def framed(payload: bytes, first: int = BINARY) -> bytes:
    """A message of a server as one frame."""
    size = len(payload)
    if size < 126:
        return struct.pack("!BB", first, size) + payload
    if size < 1 << 16:
        return struct.pack("!BBH", first, 126, size) + payload
    return struct.pack("!BBQ", first, 127, size) + payload


def close_frame(code: int, why: str) -> bytes:
    """The frame that ends a connection."""
    return framed(struct.pack("!H", code) + why.encode()[:120], 0x80 | CLOSE)
