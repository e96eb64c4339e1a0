"""Ports for servers that may be killed and started again where they were."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from pathlib import Path

LOWEST = 20_000
_given: set[int] = set()  # a server may not listen yet when the next one's port is chosen


def free_port(*further: int) -> int:
    """A port of loopback that nobody uses now, and that the kernel gives to nobody by itself.

    One of the kernel's range could be taken by any outgoing connection before a server binds it.
    The ports that lie ``further`` above it are free, too. No port is given twice.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = secrets.choice(range(LOWEST, first - max(further, default=0)))
        numbers = {port, *(port + more for more in further)}
        if numbers & _given:
            continue
        with suppress(OSError):
            for number in numbers:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
            _given.update(numbers)
            return port
