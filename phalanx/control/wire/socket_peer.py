"""Who is at the other end of a Unix socket, as the kernel says."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

_CREDENTIALS = struct.Struct("3i")


class SocketPeer(NamedTuple):
    """The process that connected, and its user; ``pid`` is 0 where it cannot be seen from here."""

    pid: int
    uid: int
    gid: int


def peer_of(connection: socket.socket) -> SocketPeer:
    """The other end of a connection that is made."""
    size = _CREDENTIALS.size
    return SocketPeer(
        *_CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    )
