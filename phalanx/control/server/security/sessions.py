"""What is open for as long as a token is good: shells, followed logs and other streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from phalanx.control.server.security.auth import Tokens

LOOK_SECONDS = 1.0  # between two looks whether a token is still good
ENDED = "your token was revoked or has expired"


async def until_over(tokens: Tokens, token: str) -> None:
    """Returns when a token is good no more."""
    while tokens.alive(token):
        await asyncio.sleep(LOOK_SECONDS)


async def while_good(
    tokens: Tokens, token: str, stream: AsyncIterator[bytes]
) -> AsyncIterator[bytes]:
    """A stream that ends with the token of whoever reads it."""
    over = asyncio.ensure_future(until_over(tokens, token))
    getting: asyncio.Future[bytes] | None = None
    try:
        while True:
            getting = asyncio.ensure_future(anext(stream))
            await asyncio.wait([getting, over], return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                yield f"[phalanx: {ENDED}]\n".encode()
                return
            try:
                piece = getting.result()
            except StopAsyncIteration:
                return
            yield piece
    finally:
        over.cancel()
        if getting is not None and not getting.done():
            getting.cancel()
            await asyncio.gather(getting, return_exceptions=True)
        if (close := getattr(stream, "aclose", None)) is not None:
            await close()
