"""Where an agent's sockets lie: short paths, since a Unix socket's may have at most 107 bytes."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from phalanx.checkpoint.keeper.start import socket_base

AGAIN_SECONDS = 5.0  # before a folder that could not be removed is tried again


def runtime_folder(state: Path) -> Path:
    """The folder of the sockets that belong to a state folder."""
    digest = hashlib.blake2b(str(state.absolute()).encode(), digest_size=6).hexdigest()
    return socket_base() / digest


def make_runtime_folder(state: Path) -> Path:
    """Made for its owner alone; others may pass through to what is theirs, but list nothing."""
    folder = runtime_folder(state)
    for path in (folder.parent, folder):
        path.mkdir(mode=0o711, exist_ok=True)
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError(f"{path} belongs to somebody else or is open to others")
        if os.getuid() == 0:  # workers may run as other users; somebody may have made it before
            path.chmod(status.st_mode | 0o011)
    return folder


async def clear_away(folder: Path, wanted: Callable[[], bool]) -> None:
    """Remove the sockets of a job that is over, unless it comes again (``wanted``) meanwhile.

    An agent without a descriptor for a moment cannot, and nobody else ever would.
    """
    while not wanted():
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        await asyncio.sleep(AGAIN_SECONDS)
