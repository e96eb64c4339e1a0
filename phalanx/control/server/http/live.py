"""``/v1/live``: the log as it grows, over a WebSocket, for pages and programs that watch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from phalanx import __version__
from phalanx.cluster.protocol.commands import Command
from phalanx.cluster.protocol.events import Event
from phalanx.control.server.http.endpoints import EVERYBODY
from phalanx.control.server.http.views import event_out, visible
from phalanx.control.server.security.auth import AuthError, Token, bearer, may_see, require
from phalanx.observe import page

if TYPE_CHECKING:
    from phalanx.control.server.leading import Leading
    from phalanx.control.server.process import Server


class LivePush(NamedTuple):
    """Something that is not in the log."""

    kind: str
    team: str  # whose it is; "": everybody's
    body: dict[str, Any]


Entry = tuple[Event, Sequence[Command]] | LivePush

MOST_WAITING = 1_000  # entries for a slow reader, who is cut off behind them
FIRST_SECONDS = 5.0
QUIET_SECONDS = 15.0  # a sign of life when nothing happens
REFUSED = 4401
QUIET = LivePush("quiet", "", {})


async def serve_live(server: Server, socket: WebSocket) -> None:
    """Sends every event that the reader may see, from the moment of connecting on.

    A browser cannot set headers, so the token may come as the first message instead.
    """
    await socket.accept()
    try:
        leading = server.leading_or_refuse()
        given = socket.headers.get("authorization")
        if given is None:
            given = f"Bearer {await _first_word(server, socket)}"
        token = leading.tokens.check(bearer(given))
        require(token, EVERYBODY)
        await _send(server, leading, token, socket)
    except AuthError as error:
        await socket.close(REFUSED, error.code)
    except (TimeoutError, WebSocketDisconnect):
        return


class AnonymousSocket(NamedTuple):
    """Somebody who has sent no token yet."""

    patience: asyncio.Timeout

    def dismiss(self) -> None:
        """Others are waiting."""
        self.patience.reschedule(0.0)


async def _first_word(server: Server, socket: WebSocket) -> str:
    """The token of somebody who could not send it with the handshake."""
    async with asyncio.timeout(FIRST_SECONDS) as patience:
        connection = AnonymousSocket(patience)
        if not server.gate.enter(connection, socket.client.host if socket.client else ""):
            raise TimeoutError
        try:
            return (await _text_of(socket)).strip()
        finally:
            server.gate.leave(connection)


async def _text_of(socket: WebSocket) -> str:
    """The first message, or nothing where it is no text."""
    message = await socket.receive()
    if message["type"] != "websocket.receive":
        raise WebSocketDisconnect(message.get("code", 1000))
    return message.get("text") or ""


async def _send(server: Server, leading: Leading, token: Token, socket: WebSocket) -> None:
    waiting: asyncio.Queue[Entry] = asyncio.Queue(MOST_WAITING)
    leading.readers.append(waiting)
    listening = asyncio.ensure_future(_until_gone(socket))
    ready = {"kind": "ready", "page": page.load().version, "version": __version__}
    await socket.send_text(msgspec.json.encode(ready).decode())
    try:
        while not listening.done() and server.leading is leading:
            try:
                async with asyncio.timeout(QUIET_SECONDS):
                    entry = await waiting.get()
            except TimeoutError:
                entry = QUIET
            if not leading.tokens.alive(token.id):
                await socket.close(REFUSED, "wrong_token")
                return
            if waiting.full():
                await socket.close(1013, "too slow")
                return
            text = _text(leading, token, entry)
            if text:
                await socket.send_text(text)
    except (WebSocketDisconnect, RuntimeError):
        return
    finally:
        leading.readers.remove(waiting)
        listening.cancel()


def _text(leading: Leading, token: Token, entry: Entry) -> str:
    """What a reader is sent; "" for what it may not see."""
    if isinstance(entry, LivePush):
        if entry.team and not may_see(token, entry.team):
            return ""
        return msgspec.json.encode({"kind": entry.kind, **entry.body}).decode()
    event, commands = entry
    if not visible(leading.core, event, commands, lambda team: may_see(token, team)):
        return ""
    return msgspec.json.encode(event_out(event, commands)).decode()


async def _until_gone(socket: WebSocket) -> None:
    try:
        while True:
            await socket.receive_text()
    except (WebSocketDisconnect, RuntimeError, KeyError):
        return
