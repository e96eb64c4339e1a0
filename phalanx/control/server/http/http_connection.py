"""uvicorn's HTTP connection with deadlines: for the head of each request, its body, and strangers.

uvicorn itself waits for ever for the rest of a head or body, so that a few thousand connections
that send a byte now and then would be kept for nothing.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from phalanx.control.server.security.connection_gate import ConnectionGate

HEAD_SECONDS = 10.0  # for a whole head, from its first byte (of the first: from the connection on)
BODY_SECONDS = 30.0  # for a whole body, and a second more for each of these bytes
BODY_BYTES_PER_SECOND = 64 << 10
STRANGER_SECONDS = 60.0  # of a connection that shows no token
MOST_HEAD_BYTES = 64 << 10
TOO_LONG = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"Content-Length: 0\r\nConnection: close\r\n\r\n"
)
TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class HttpConnection(HttpToolsProtocol):
    """One connection of a person or program."""

    def __init__(self, gate: ConnectionGate, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self._gate = gate
        self._due: asyncio.TimerHandle | None = None
        self._life: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_head = True

    def connection_made(self, transport: Any) -> None:
        """The head of the first request is due."""
        super().connection_made(transport)
        if self.client is not None:
            self._gate.known_as(self.client, self)
        self._arm(HEAD_SECONDS)
        self._life = self.loop.call_later(STRANGER_SECONDS, self._still_unknown)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is due any more."""
        self._let_go()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some bytes; a head that grows too long ends the connection."""
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(TOO_LONG)
            self.transport.close()

    def on_message_begin(self) -> None:
        """The head of a request begins."""
        super().on_message_begin()
        self._in_head = True
        if self.cycle is not None:
            self._arm(HEAD_SECONDS)

    def on_headers_complete(self) -> None:
        """The body is due."""
        self._in_head, self._head_bytes = False, 0
        length = dict(self.headers).get(b"content-length", b"0")
        size = int(length) if length.isdigit() and len(length) < 20 else 0
        self._arm(min(2 * STRANGER_SECONDS, BODY_SECONDS + size / BODY_BYTES_PER_SECOND))
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """A request is whole."""
        self._in_head, self._head_bytes = True, 0
        self._disarm()
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        """It is a WebSocket from now on, whose handler has deadlines of its own."""
        self._let_go()
        super().handle_websocket_upgrade()

    def dismiss(self) -> None:
        """Close it at once: others are waiting."""
        self.transport.abort()

    def _still_unknown(self) -> None:
        """Whoever has shown no token by now is not worth a connection."""
        self._life = None
        if self._gate.is_anonymous(self):
            self.transport.abort()

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._due = self.loop.call_later(seconds, self._too_slow)

    def _disarm(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _too_slow(self) -> None:
        self._due = None
        if not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(TOO_SLOW)
            self.transport.abort() if self._in_head else self.transport.close()

    def _let_go(self) -> None:
        self._disarm()
        if self._life is not None:
            self._life.cancel()
            self._life = None
        self._gate.leave(self)
        if self.client is not None:
            self._gate.forget(self.client)
