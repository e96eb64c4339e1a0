"""One agent's WebSocket: frames leave in order, without anybody waiting for a slow peer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from phalanx.control.fast_socket import FastSocket, framed, payload_of
from phalanx.control.wire import Rejected, encode

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MOST_WAITING_BYTES = 64 << 20  # an agent that far behind is cut off and told anew what matters
REJECTED, TOO_SLOW = 4000, 1013  # WebSocket close codes; the first comes behind a ``Rejected``


class Connection:
    """The sending side of an agent's WebSocket; ``socket``: the short way, where there is one."""

    __slots__ = ("_bytes", "_frames", "_send", "_task", "closed", "machine", "node", "socket")

    def __init__(
        self, node: int, machine: str, send: Send, socket: FastSocket | None = None
    ) -> None:
        self.node, self.machine, self.socket = node, machine, socket
        self.closed = False
        self._send = send
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._task: asyncio.Task[None] | None = None

    def push(self, frame: bytes) -> None:
        """Sends a frame behind the others."""
        if self.closed:
            return
        if self.socket is not None:
            waiting = self.socket.write(frame)
        else:
            self._frames.append(frame)
            self._bytes = waiting = self._bytes + len(frame)
            if self._task is None:
                self._task = asyncio.ensure_future(self._drain())
        if waiting > MOST_WAITING_BYTES:
            self._frames.clear()
            self._end(TOO_SLOW, "too far behind")

    def close(self, rejected: Rejected) -> None:
        """Says why, behind what is already on its way, and ends the connection."""
        if not self.closed:
            self.push(framed(encode(rejected)))
            self._end(REJECTED, rejected.code)

    def _end(self, code: int, why: str) -> None:
        self.closed = True
        self._task = asyncio.ensure_future(self._close(code, why, self._task))

    async def _drain(self) -> None:
        try:
            while self._frames:
                frame = self._frames.popleft()
                self._bytes -= len(frame)
                await self._send({"type": "websocket.send", "bytes": payload_of(frame)})
        except (OSError, RuntimeError):
            self.closed = True  # the peer is gone: its reader finds out and cleans up
        finally:
            if not self.closed:
                self._task = None

    async def _close(self, code: int, why: str, before: asyncio.Task[None] | None) -> None:
        try:
            if before is not None:
                await before
            await self._send({"type": "websocket.close", "code": code, "reason": why})
        except (OSError, RuntimeError):
            return  # it is gone already
