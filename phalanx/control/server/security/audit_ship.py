"""Sends every line of the audit log elsewhere: to syslog (RFC 5424) or to a webhook.

Each receiver has a thread and a bounded queue of its own. One that does not answer is tried again,
ever more slowly; what does not fit the queue meanwhile is counted, and the receiver is told how
many lines it missed.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from urllib.parse import urlsplit

from phalanx.control.server.webhooks import bad_address, post

logger = logging.getLogger("phalanx.server")

MOST_WAITING = 10_000
MOST_AT_ONCE = 200  # lines of one request to a webhook
PAUSE_SECONDS, LONGEST_SECONDS = 1.0, 60.0
SEND_SECONDS = 10.0
PRIORITY = 13 * 8 + 5  # facility "log audit", severity "notice"
LINES = "application/x-ndjson"

Send = Callable[[list[bytes]], str]  # why it was not taken; "": it was


class Shipper:
    """One receiver."""

    def __init__(self, name: str, send: Send, pause_seconds: float = PAUSE_SECONDS) -> None:
        self.name = name
        self.sent = self.lost = 0
        self._send, self._pause_seconds = send, pause_seconds
        self._said = 0  # of the lost lines
        self._waiting: queue.Queue[bytes] = queue.Queue(MOST_WAITING)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    def take(self, line: bytes) -> None:
        """A line for this receiver; never waits."""
        try:
            self._waiting.put_nowait(line.rstrip(b"\n"))
        except queue.Full:
            self.lost += 1

    def close(self, seconds: float = 2.0) -> None:
        """Sends what waits, if that is quick."""
        self._over.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        while not (self._over.is_set() and self._waiting.empty()):
            lines = self._next()
            if lines and not self._deliver(lines):
                return

    def _next(self) -> list[bytes]:
        try:
            lines = [self._waiting.get(timeout=0.2)]
        except queue.Empty:
            return []
        while len(lines) < MOST_AT_ONCE and not self._waiting.empty():
            lines.append(self._waiting.get_nowait())
        if missed := self.lost - self._said:
            self._said += missed
            lines.append(
                f'{{"action":"audit","detail":"{missed} lines were not shipped"}}'.encode()
            )
        return lines

    def _deliver(self, lines: list[bytes]) -> bool:
        """Until they are taken; False: the server ends."""
        pause, reported = self._pause_seconds, False
        while problem := self._send(lines):
            if not reported:
                logger.warning("audit log to %s: %s; trying again", self.name, problem)
                reported = True
            if self._over.wait(pause):
                return False
            pause = min(2 * pause, LONGEST_SECONDS)
        if reported:
            logger.warning("audit log to %s: lines are taken again", self.name)
        self.sent += len(lines)
        return True


def bad_receiver(where: str) -> str:
    """What is wrong with a receiver; "": nothing."""
    url = urlsplit(where)
    if where.startswith("unix:"):
        return "" if url.path else "name the socket: unix:/dev/log"
    if url.scheme == "udp":
        return "" if url.hostname else "name a host: udp://loghost:514"
    return bad_address(where) and "give unix:/dev/log, udp://host:514 or https://host/path"


def shipper(where: str) -> Shipper:
    """The receiver at ``unix:/dev/log``, ``udp://host:514`` or an address of HTTP."""
    url = urlsplit(where)
    if where.startswith("unix:"):
        return Shipper(where, _to_socket(socket.AF_UNIX, url.path))
    if url.scheme == "udp":
        return Shipper(where, _to_socket(socket.AF_INET, (url.hostname or "", url.port or 514)))
    return Shipper(url.hostname or "webhook", lambda lines: post(where, b"\n".join(lines), LINES))


def syslog_message(line: bytes, host: str, now: datetime) -> bytes:
    """A line as RFC 5424 wants it."""
    stamp = now.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return f"<{PRIORITY}>1 {stamp} {host} phalanx {os.getpid()} audit - ".encode() + line


def _to_socket(family: int, address: str | tuple[str, int]) -> Send:
    host = socket.gethostname() or "-"

    def send(lines: list[bytes]) -> str:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as opened:
                opened.settimeout(SEND_SECONDS)
                opened.connect(address)
                while lines:
                    opened.send(syslog_message(lines[0], host, datetime.now(UTC)))
                    del lines[0]
        except OSError as error:
            return error.strerror or type(error).__name__
        return ""

    return send
