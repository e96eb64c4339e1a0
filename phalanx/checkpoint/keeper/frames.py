"""Messages over a stream between processes: msgpack with its length before it."""

from __future__ import annotations

import struct

import msgspec
from msgspec import Struct

LENGTH = struct.Struct("<I")
MOST_BYTES = 64 << 20  # of one message

_encode = msgspec.msgpack.Encoder().encode


def framed(message: Struct) -> bytes:
    """A message with its length before it."""
    body = _encode(message)
    return LENGTH.pack(len(body)) + body


class Unframer:
    """Whole messages out of a stream that may stop anywhere."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._rest, self._most_bytes = b"", most_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that these bytes complete; ValueError where one is too long."""
        self._rest += data
        bodies = []
        while len(self._rest) >= LENGTH.size:
            size = LENGTH.unpack_from(self._rest)[0]
            if size > self._most_bytes:
                raise ValueError(f"a message of {size} bytes")
            end = LENGTH.size + size
            if len(self._rest) < end:
                break
            bodies.append(self._rest[LENGTH.size : end])
            self._rest = self._rest[end:]
        return bodies
