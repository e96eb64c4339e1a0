"""Files that hold a secret, or are at least nobody else's business."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path


def read_text(path: Path) -> str:
    """What a small file says; "" where there is none."""
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def write_secret(path: Path, text: str) -> None:
    """A file that only its owner reads, whole or not at all."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(handle, text.encode() + b"\n")
        os.fsync(handle)
    finally:
        os.close(handle)
    temporary.rename(path)


def make_private(folder: Path) -> None:
    """Files that an earlier release, or somebody, left readable for others are so no more."""
    for path in (*folder.iterdir(), *(folder / "archive").glob("*")):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_mode & 0o077:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                os.fchmod(handle, 0o600)
            finally:
                os.close(handle)
