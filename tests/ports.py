"""Ports for servers of tests."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from pathlib import Path

LOWEST = 20_000


def free_port(*further: int) -> int:
    """A port of loopback that nobody uses now, and that the kernel gives to nobody by itself.

    One of the kernel's range could be taken by any outgoing connection before a server binds it.
    The ports that lie ``further`` above it are free, too.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = secrets.choice(range(LOWEST, first - max(further, default=0)))
        with suppress(OSError):
            for number in (port, *(port + more for more in further)):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
            return port
