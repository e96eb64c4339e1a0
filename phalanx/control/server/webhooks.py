"""Tells other programs of findings and ended jobs: HTTP POST, bounded, repeated a few times.

The address may carry a secret, so logs name the host alone. A receiver that does not answer costs
its own messages and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec

logger = logging.getLogger("phalanx.server")

MOST_WAITING = 1_000
TRIES = 4
TIMEOUT_SECONDS = 10.0
PAUSE_SECONDS = 1.0  # before the second try; doubled with each
JOB_SENDERS = 2  # messages to addresses of jobs that are sent at a time

Sender = Callable[[str, bytes], str]  # to an address: why a message was not taken; "": it was


class Webhooks:
    """All receivers. Messages leave in order, one receiver not waiting for another."""

    def __init__(self, urls: tuple[str, ...], pause_seconds: float = PAUSE_SECONDS) -> None:
        self._urls, self._pause_seconds = urls, pause_seconds
        self._waiting: list[asyncio.Queue[bytes]] = [asyncio.Queue(MOST_WAITING) for _ in urls]
        self._of_jobs: asyncio.Queue[tuple[str, bytes, Sender]] = asyncio.Queue(MOST_WAITING)
        self.sent = self.dropped = self.failed = 0

    def tell_job(self, address: str, kind: str, body: dict[str, Any], send: Sender) -> None:
        """Have a message sent to the address that a job brought with it."""
        self.send_soon(address, msgspec.json.encode({"kind": kind, **body}), send)

    def send_soon(self, address: str, data: bytes, send: Sender) -> None:
        """Have a message sent to an address that somebody named."""
        try:
            self._of_jobs.put_nowait((address, data, send))
        except asyncio.QueueFull:
            self.dropped += 1

    def tell(self, kind: str, body: dict[str, Any]) -> None:
        """Have a message sent; of too many the newest are dropped and counted."""
        data = msgspec.json.encode({"kind": kind, **body})
        for waiting in self._waiting:
            try:
                waiting.put_nowait(data)
            except asyncio.QueueFull:
                self.dropped += 1

    async def run(self) -> None:
        """Send until cancelled."""
        receivers = [self._serve(index) for index in range(len(self._urls))]
        await asyncio.gather(*receivers, *(self._serve_jobs() for _ in range(JOB_SENDERS)))

    async def _serve(self, index: int) -> None:
        while True:
            await self._send(self._urls[index], await self._waiting[index].get(), post)

    async def _serve_jobs(self) -> None:
        while True:
            await self._send(*await self._of_jobs.get())

    async def _send(self, url: str, data: bytes, send: Sender) -> None:
        for attempt in range(TRIES):
            problem = await asyncio.to_thread(send, url, data)
            if not problem:
                self.sent += 1
                return
            if attempt + 1 < TRIES:
                await asyncio.sleep(self._pause_seconds * 2**attempt)
        self.failed += 1
        receiver = urlsplit(url).hostname or "mail"
        logger.warning("webhook %s: %s; message dropped", receiver, problem)


def bad_address(url: str) -> str:
    """What is wrong with the address of a receiver; "": nothing."""
    try:
        where = urlsplit(url)
    except ValueError as error:
        return f"is no address: {error}"
    if where.scheme not in ("http", "https") or not where.hostname:
        return "a webhook is an address like https://host/path"
    return ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Redirects are not followed: only the address that was allowed is called."""

    def redirect_request(self, *_: Any) -> None:
        return None


def post_there(url: str, data: bytes) -> str:
    """As ``post``, without following redirects."""
    return post(url, data, opened=urllib.request.build_opener(_NoRedirect).open)


def post(
    url: str,
    data: bytes,
    kind: str = "application/json",
    opened: Callable[..., Any] = urllib.request.urlopen,
) -> str:
    """Why it was not taken; "" when it was. The words hold nothing of the address."""
    headers = {"Content-Type": kind, "User-Agent": "phalanx"}
    request = urllib.request.Request(url, data, headers, method="POST")
    try:
        with opened(request, timeout=TIMEOUT_SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        return f"answered {error.code}"
    except urllib.error.URLError as error:
        return f"cannot be reached ({type(error.reason).__name__})"
    except (OSError, ValueError) as error:
        return f"failed ({type(error).__name__})"
