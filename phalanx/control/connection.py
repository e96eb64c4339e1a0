"""One agent's WebSocket: frames leave in order, without anybody waiting for a slow peer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from phalanx.control.wire import Rejected, encode

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MOST_WAITING_BYTES = 64 << 20  # an agent that far behind is cut off and told anew what matters
REJECTED = 4000  # WebSocket close code behind a ``Rejected``


class Connection:
    """The sending side of an agent's WebSocket."""

    __slots__ = ("_bytes", "_frames", "_send", "_task", "closed", "machine", "node")

    def __init__(self, node: int, machine: str, send: Send) -> None:
        self.node, self.machine = node, machine
        self.closed = False
        self._send = send
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._task: asyncio.Task[None] | None = None

    def push(self, frame: bytes) -> None:
        """Puts a frame behind the others; a task sends them."""
        if self.closed:
            return
        if self._bytes + len(frame) > MOST_WAITING_BYTES:
            self._frames.clear()
            self._bytes = 0
            self.closed = True
            self._task = asyncio.ensure_future(self._close(1013, "too far behind"))
            return
        self._frames.append(frame)
        self._bytes += len(frame)
        if self._task is None:
            self._task = asyncio.ensure_future(self._drain())

    def close(self, rejected: Rejected) -> None:
        """Says why, behind what is already on its way, and ends the connection."""
        if not self.closed:
            self.push(encode(rejected))
            self.closed = True

    async def _drain(self) -> None:
        try:
            while self._frames:
                frame = self._frames.popleft()
                self._bytes -= len(frame)
                await self._send({"type": "websocket.send", "bytes": frame})
            if self.closed:
                await self._close(REJECTED, "see the last message")
        except (OSError, RuntimeError):
            self.closed = True  # the peer is gone: its reader finds out and cleans up
        finally:
            self._task = None

    async def _close(self, code: int, why: str) -> None:
        await self._send({"type": "websocket.close", "code": code, "reason": why})
