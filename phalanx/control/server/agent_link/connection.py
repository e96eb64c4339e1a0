"""One agent's connection, from its handshake to its end; nobody waits for a slow peer."""

from __future__ import annotations

import asyncio
import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from phalanx.control.server.agent_link.handshake import (
    REVOKED,
    bad_register,
    is_known,
    let_in,
    new_node,
)
from phalanx.control.server.controller import UnavailableError
from phalanx.control.server.http.front import FIRST_SECONDS, Headers, accepted
from phalanx.control.server.security.auth import AuthError, Token, bearer, require
from phalanx.control.server.security.joining import refuse_elsewhere
from phalanx.control.server.store.interface import StoreError
from phalanx.control.trust.node_key import NONCE_BYTES
from phalanx.control.wire.agent_messages import (
    PROTOCOL,
    Register,
    RejectCode,
    Rejected,
    decode_up,
    encode,
)
from phalanx.control.wire.websocket_frames import (
    CLOSE,
    PING,
    PONG,
    PROTOCOL_ERROR,
    FrameError,
    Frames,
    close_frame,
    framed,
)

if TYPE_CHECKING:
    from phalanx.control.server.agent_link.connections import Hub
    from phalanx.control.server.process import Server

MOST_MESSAGE_BYTES = 16 << 20
MOST_WAITING_BYTES = 64 << 20  # an agent that far behind is cut off and told anew what matters
REJECTED, TOO_SLOW, STOPPED = 4000, 1013, 1012  # close codes; the first comes behind a ``Rejected``
FAREWELL_SECONDS = 5.0  # a peer that does not close by then is cut off
GOOD = 101
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)  # as messages of a peer can be


class AgentSocket(asyncio.Protocol):
    """The server's end. ``node`` is -1 until the agent is let in."""

    __slots__ = (
        "_due",
        "_frames",
        "_headers",
        "_hub",
        "_joining",
        "_nonce",
        "_server",
        "_state",
        "_token",
        "_transport",
        "closed",
        "machine",
        "node",
        "token",
    )

    def __init__(self, server: Server, headers: Headers, state: Any) -> None:
        self._server, self._headers, self._state = server, headers, state
        self._frames = Frames(self._take, MOST_MESSAGE_BYTES)
        self._hub: Hub | None = None
        self._token: Token | None = None
        self._joining: asyncio.Task[None] | None = None
        self._due: asyncio.TimerHandle | None = None  # for the first message
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._nonce = secrets.token_bytes(NONCE_BYTES)  # what the agent signs
        self.node, self.machine, self.token, self.closed = -1, "", "", False

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The handshake has been read; it is answered here."""
        self._transport = transport  # type: ignore[assignment]
        self._state.connections.add(self)
        try:
            leading = self._server.leading_or_refuse()
            answer = accepted(self._headers, self._nonce, leading.hub.key)
            if answer is None:
                text = "this is no handshake of an agent: WebSocket version 13 is spoken here"
                raise AuthError(400, "bad_request", text)
            secret = bearer(self._headers.get(b"authorization", b"").decode("latin-1"))
            self._token = leading.tokens.check(secret)
            require(self._token, ("agent",))
            refuse_elsewhere(self._token, self._client())
        except AuthError as error:
            self._refuse_handshake(error)
            return
        self._hub = leading.hub
        self._headers = {}
        late = partial(self.end, PROTOCOL_ERROR, "no Register came")
        self._due = asyncio.get_running_loop().call_later(FIRST_SECONDS, late)
        self._transport.write(answer)

    def data_received(self, data: bytes) -> None:
        try:
            self._frames.feed(data)
        except FrameError as error:
            self.end(error.code, str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._state.connections.discard(self)
        if self._due is not None:
            self._due.cancel()
        if self._joining is not None:
            self._joining.cancel()
        if self._hub is not None and self.node >= 0:
            self._hub.disconnect(self)

    def shutdown(self) -> None:
        """uvicorn stops serving."""
        if not self.closed:
            self._transport.write(close_frame(STOPPED, "the server stops"))
        self.closed = True
        self._transport.close()

    # What the hub calls.

    def push(self, frame: bytes) -> None:
        """Sends a frame behind the others."""
        if self.closed or self._transport.is_closing():
            return
        self._transport.write(frame)
        if self._transport.get_write_buffer_size() > MOST_WAITING_BYTES:
            self.closed = True
            self._transport.abort()

    def close(self, rejected: Rejected) -> None:
        """Says why, behind what is already on its way, and ends the connection."""
        self.push(framed(encode(rejected)))
        self.end(REJECTED, rejected.code)

    def end(self, code: int, why: str) -> None:
        """Asks the peer to close; what it says until then is not heard any more."""
        if self.closed or self._transport.is_closing():
            return
        self._transport.write(close_frame(code, why))
        self.closed = True
        # Closing at once could take back what was just said, were anything unread.
        asyncio.get_running_loop().call_later(FAREWELL_SECONDS, self._transport.abort)

    # What the peer says.

    def _take(self, opcode: int, payload: bytes) -> None:
        if opcode == CLOSE:
            if not self.closed:
                self._transport.write(framed(payload[:2], 0x80 | CLOSE))
            self.closed = True
            self._transport.close()
        elif self.closed:
            return
        elif opcode == PING:
            self._transport.write(framed(payload, 0x80 | PONG))
        elif opcode != PONG:
            self._message(payload)

    def _message(self, data: bytes) -> None:
        assert self._hub is not None
        if self.node < 0 and self._joining is not None:
            self._refuse(self._hub, "an agent says who it is once, and then waits for its welcome")
            return
        if self.node < 0:
            self._first(self._hub, data)
            return
        try:
            message = decode_up(data)
        except UNREADABLE as error:
            text = f"a message cannot be read: {error}"
            self.close(self._hub.rejected(RejectCode.PROTOCOL, text))
            return
        try:
            self._hub.receive(self, message)
        except Exception as error:  # what one node says must not cost it, or others, more
            about = f"{type(message).__name__} of node {self.node}"
            self._hub.controller.alarms.raised("agents' messages", error, about)

    def _first(self, hub: Hub, data: bytes) -> None:
        """``Register``, or what is wrong with it."""
        assert self._token is not None and self._due is not None
        self._due.cancel()
        try:
            register = decode_up(data)
        except UNREADABLE as error:
            self._refuse(hub, f"the first message cannot be read: {error}")
            return
        if not isinstance(register, Register):
            self._refuse(hub, f"the first message must be Register, not {type(register).__name__}")
            return
        refused = self._revoked(hub) or bad_register(hub, self._token, register, self._nonce)
        if refused is not None:
            if refused.code not in (RejectCode.PENDING, RejectCode.UNLINKED):
                self._audit(403, refused.message)
            self.close(refused)
        elif is_known(hub, register) and self._token.key and not self._token.unconfirmed:
            self._let_in(hub, register)
        else:
            self._transport.pause_reading()  # what follows is of a node that the core knows so
            self._joining = asyncio.ensure_future(self._join(hub, register))

    async def _join(self, hub: Hub, register: Register) -> None:
        leading = self._server.leading
        assert self._token is not None
        try:
            if leading is None or leading.hub is not hub:
                raise UnavailableError("this server leads no more")
            if self._token.unconfirmed or not self._token.key:
                bound = structs.replace(self._token, key=register.key)
                self._token = await leading.joining.confirm(bound)
            if not is_known(hub, register) and not self._revoked(hub):
                await hub.controller.order(new_node(register))
        except Exception as error:
            if not isinstance(error, UnavailableError | StoreError):
                hub.controller.alarms.raised("agents' first words", error, register.node.name)
            text = "the server cannot store this now"
            self.close(hub.rejected(RejectCode.INTERNAL, text, retry=True))
            return
        finally:
            if not self._transport.is_closing():
                self._transport.resume_reading()
        refused = self._revoked(hub)
        if refused is not None:
            self.close(refused)
        elif not self.closed:
            self._let_in(hub, register)

    def _revoked(self, hub: Hub) -> Rejected | None:
        """Why its token, which was good at the handshake, is good no more; None: it is."""
        leading = self._server.leading
        assert self._token is not None
        if leading is None or leading.hub is not hub or leading.tokens.alive(self._token.id):
            return None
        return hub.rejected(RejectCode.REPLACED, REVOKED, retry=True)

    def _let_in(self, hub: Hub, register: Register) -> None:
        assert self._token is not None
        let_in(hub, self._token, register, self)
        self._audit(GOOD)

    def _refuse(self, hub: Hub, text: str) -> None:
        text = f"{text} (this server speaks protocol {PROTOCOL})"
        self._audit(403, text)
        self.close(hub.rejected(RejectCode.PROTOCOL, text))

    def _refuse_handshake(self, error: AuthError) -> None:
        server, client = self._server, self._client()
        server.audit.write("agent", error.status, client=client, detail=error.code)
        wait = (
            server.limits.addresses.take(client, time.monotonic()) if error.status == 401 else 0.0
        )
        if wait:
            error = AuthError(429, "too_many_requests", f"too many wrong tokens: wait {wait:.1f} s")
        body = msgspec.json.encode({"error": {"code": error.code, "message": str(error)}})
        head = (
            f"HTTP/1.1 {error.status} Refused\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.closed = True
        self._transport.write(head.encode() + body)
        self._transport.close()

    def _audit(self, status: int, detail: str = "") -> None:
        action = "agent connected" if status == GOOD else "agent"
        name = self._token.node if self._token is not None else ""
        self._server.audit.write(action, status, name=name, client=self._client(), detail=detail)

    def _client(self) -> str:
        peer = self._transport.get_extra_info("peername")
        return str(peer[0]) if peer else ""
