"""The first look at a connection: agents get a short way of their own, everybody else uvicorn's.

An agent's handshake and frames skip ASGI: no queue, no task and no second parser for each of
thousands. Whatever is no WebSocket handshake for ``/v1/agent`` goes on as if nobody had looked,
once its first head is whole. Heads that show no token take turns, a few at a time: whoever shows
one waits for none of them.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import re
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from phalanx.control.server.http.http_connection import (
    HEAD_SECONDS,
    MOST_HEAD_BYTES,
    TOO_LONG,
    TOO_SLOW,
    HttpConnection,
)
from phalanx.control.server.security.connection_gate import ConnectionGate
from phalanx.control.wire.agent_messages import AGENT_PATH

if TYPE_CHECKING:
    from phalanx.control.server.agent_link.connection import AgentSocket
    from phalanx.control.trust.server_key import ServerKey

AGENT_LINE = f"GET {AGENT_PATH} HTTP/1.1\r\n".encode()
MOST_AGENT_HEAD_BYTES = 16 << 10
FIRST_SECONDS = 30.0  # for an agent's first message
STRANGERS_AT_A_TURN = 4
CREDENTIALS = re.compile(rb"\r\n(authorization|cookie) *:", re.IGNORECASE)
GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # of RFC 6455

Headers = dict[bytes, bytes]


class Turns:
    """Work for strangers, which is done a little at a time."""

    def __init__(self, at_a_turn: int = STRANGERS_AT_A_TURN) -> None:
        self._at_a_turn = at_a_turn
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_due = False

    def wait(self, work: Callable[[], None]) -> None:
        """Has something done when those before it are served."""
        self._waiting.append(work)
        self._go_on()

    def _go_on(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        self._is_due = False
        try:
            for _ in range(min(self._at_a_turn, len(self._waiting))):
                self._waiting.popleft()()
        finally:
            self._go_on()


class NewConnection(asyncio.Protocol):
    """One connection until its first words tell who it is."""

    __slots__ = ("_agent", "_buffer", "_due", "_gate", "_state", "_transport", "_turns", "_uvicorn")

    def __init__(
        self,
        agent: Callable[[Headers, Any], AgentSocket],
        gate: ConnectionGate,
        turns: Turns,
        server_state: Any,
        **rest: Any,
    ) -> None:
        self._agent, self._gate, self._turns, self._state = agent, gate, turns, server_state
        self._uvicorn = rest
        self._buffer = bytearray()
        self._transport: asyncio.Transport = None  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._state.connections.add(self)
        loop = asyncio.get_running_loop()
        self._due = loop.call_later(HEAD_SECONDS, self._too_slow)
        peer = transport.get_extra_info("peername")
        if not self._gate.enter(self, str(peer[0]) if peer else ""):
            self.dismiss()

    def connection_lost(self, exc: Exception | None) -> None:
        self._due.cancel()
        self._gate.leave(self)
        self._state.connections.discard(self)

    def dismiss(self) -> None:
        """Close it at once: others are waiting."""
        self._transport.abort()

    def shutdown(self) -> None:
        """uvicorn stops serving."""
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        whole = len(self._buffer)
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n", max(0, whole - 3))
        of_agent = AGENT_LINE.startswith(self._buffer[: len(AGENT_LINE)])
        if end < 0 and not self._buffer[:1].isupper():  # no request: uvicorn says so
            self._hand_over(self._plain(), bytes(self._buffer))
            return
        if end < 0:
            if len(self._buffer) > (MOST_AGENT_HEAD_BYTES if of_agent else MOST_HEAD_BYTES):
                self._transport.write(TOO_LONG)
                self._transport.close()
            return
        self._due.cancel()
        if of_agent:
            headers = headers_of(bytes(self._buffer[len(AGENT_LINE) : end]))
            if headers is not None and headers.get(b"upgrade", b"").lower() == b"websocket":
                self._gate.leave(self)  # its token is looked at in a moment
                first = bytes(self._buffer[end + 4 :])
                self._hand_over(self._agent(headers, self._state), first)
                return
        if CREDENTIALS.search(self._buffer, 0, end):
            self._hand_over(self._plain(), bytes(self._buffer))
        else:
            self._transport.pause_reading()
            self._turns.wait(self._take_turn)

    def _take_turn(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()
            self._hand_over(self._plain(), bytes(self._buffer))

    def _too_slow(self) -> None:
        if self._buffer:
            self._transport.write(TOO_SLOW)
        self._transport.abort()

    def _plain(self) -> asyncio.Protocol:
        plain = HttpConnection(self._gate, server_state=self._state, **self._uvicorn)
        self._gate.replace(self, plain)
        return plain

    def _hand_over(self, protocol: asyncio.Protocol, data: bytes) -> None:
        transport = self._transport
        self._due.cancel()
        self._state.connections.discard(self)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if data and not transport.is_closing():
            protocol.data_received(data)


def headers_of(data: bytes) -> Headers | None:
    """Headers by their names in small letters; None where they cannot be read."""
    headers: Headers = {}
    for line in data.split(b"\r\n"):
        name, colon, value = line.partition(b":")
        key = name.lower()
        if not colon or not key or key != key.strip() or key in headers:
            return None
        headers[key] = value.strip()
    return headers


def accepted(headers: Headers, nonce: bytes, server: ServerKey) -> bytes | None:
    """The answer to a handshake, with what the agent shall prove.

    None where it asks for something else than we speak.
    """
    key = headers.get(b"sec-websocket-key", b"")
    options = [word.strip() for word in headers.get(b"connection", b"").lower().split(b",")]
    try:
        good = len(base64.b64decode(key, validate=True)) == 16
    except binascii.Error:
        good = False
    if not good or b"upgrade" not in options or headers.get(b"sec-websocket-version") != b"13":
        return None
    proof = base64.b64encode(hashlib.sha1(key + GUID).digest())
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + proof + b"\r\n"
        b"X-Phalanx-Nonce: " + nonce.hex().encode() + b"\r\n"
        b"X-Phalanx-Server: " + server.public.hex().encode() + b"\r\n"
        b"X-Phalanx-Agreement: " + server.agreement.public.hex().encode() + b"\r\n\r\n"
    )
