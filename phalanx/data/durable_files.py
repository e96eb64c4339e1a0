"""Small files that survive a power cut, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_synced(path: Path, content: bytes) -> None:
    """Write a small file and wait until it is on disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable, with all earlier renames there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes, draft: str = "tmp") -> None:
    """Give ``path`` this content, entirely or not at all; ``draft``: names this writer's own."""
    temporary = path.with_name(f"{path.name}.{draft}")
    write_synced(temporary, content)
    temporary.replace(path)
    sync_folder(path.parent)


def create_once(path: Path, content: bytes, draft: str) -> bool:
    """Make a file that nobody else has made; False if somebody was first."""
    temporary = path.with_name(f"{path.name}.{draft}")
    write_synced(temporary, content)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True
