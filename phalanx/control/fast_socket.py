"""A shorter way between an agent's socket and the hub, for fleets of thousands.

Through ASGI each message takes a queue, a task switch and two calls that pause and resume reading.
Agents' small frames skip that: they go from the parser straight to the hub, and a frame for many
agents is made once and written to each socket as it is. Anything else takes the usual way.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

if TYPE_CHECKING:
    from websockets.frames import Frame
    from websockets.http11 import Request

EXTENSION = "phalanx.socket"
BINARY = 0x82  # a whole message in one frame


class FastSocket(WebSocketsSansIOProtocol):
    """uvicorn's own protocol, which the application may reach through its scope."""

    direct: Callable[[bytes], None] | None = None  # takes whole binary messages, once it is set

    def handle_connect(self, event: Request) -> None:
        """The handshake; the application finds this object among the extensions."""
        super().handle_connect(event)
        scope: Any = getattr(self, "scope", None)
        if scope is not None:
            scope["extensions"][EXTENSION] = self

    def handle_bytes(self, event: Frame) -> None:
        """A binary frame: straight to whoever takes it, or the usual way."""
        if self.direct is not None and event.fin and not self.close_sent:
            self.direct(bytes(event.data))
        else:
            super().handle_bytes(event)

    async def send(self, message: Any) -> None:
        """As usual; a handshake that was refused with an answer is over, too."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True

    def write(self, framed: bytes) -> int:
        """Sends a frame as it is; returns the bytes that wait for the peer."""
        if not self.transport.is_closing() and not self.close_sent:
            self.transport.write(framed)
        return self.transport.get_write_buffer_size()


def framed(payload: bytes) -> bytes:
    """A binary message of a server as one frame."""
    size = len(payload)
    if size < 126:
        return struct.pack("!BB", BINARY, size) + payload
    if size < 1 << 16:
        return struct.pack("!BBH", BINARY, 126, size) + payload
    return struct.pack("!BBQ", BINARY, 127, size) + payload


def payload_of(frame: bytes) -> bytes:
    """The message in a frame that ``framed`` made."""
    return frame[{126: 4, 127: 10}.get(frame[1], 2) :]
