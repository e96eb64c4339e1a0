"""The audit log: who asked for what, and what came of it. Tokens themselves never stand in it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
from msgspec import Struct

ROTATE_BYTES = 64 << 20
FILES_KEPT = 8


class Entry(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the audit log."""

    time_ns: int
    action: str  # method and path, or what the server did by itself
    status: int
    token: str = ""  # its id
    name: str = ""
    role: str = ""
    client: str = ""
    detail: str = ""


class Audit:
    """Appends lines to ``audit.jsonl`` and rotates it by size."""

    def __init__(self, path: Path, rotate_bytes: int = ROTATE_BYTES) -> None:
        self.path = path
        self._rotate_bytes = rotate_bytes
        self._file = -1
        self._size = 0
        self.lost = 0  # lines that could not be written (full disk)
        self._open()

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(self.path, flags, 0o600)
        self._size = os.fstat(self._file).st_size

    def write(
        self,
        action: str,
        status: int,
        *,
        token: str = "",
        name: str = "",
        role: str = "",
        client: str = "",
        detail: str = "",
    ) -> None:
        """Adds a line. A full disk loses lines, which are counted, but stops nobody's job."""
        entry = Entry(
            time_ns=time.time_ns(),
            action=action,
            status=status,
            token=token,
            name=name,
            role=role,
            client=client,
            detail=detail,
        )
        line = msgspec.json.encode(entry) + b"\n"
        try:
            if self._size + len(line) > self._rotate_bytes:
                self._rotate()
            self._size += os.write(self._file, line)
        except OSError:
            self.lost += 1

    def _rotate(self) -> None:
        os.close(self._file)
        for number in range(FILES_KEPT - 1, 0, -1):
            older = self._numbered(number)
            if older.exists():
                older.rename(self._numbered(number + 1))
        self.path.rename(self._numbered(1))
        self._open()

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
