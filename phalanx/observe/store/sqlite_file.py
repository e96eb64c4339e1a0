"""SQLite files that may be missed: a damaged one is set aside, and a new one begins."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger("phalanx.server")

T = TypeVar("T")
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the file is at fault, and not a full disk or a lock, which pass."""
    return (getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF in DAMAGED


def check_whole(database: sqlite3.Connection) -> None:
    """DatabaseError where the structure of a file is damaged; reads all of it."""
    (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        error = sqlite3.DatabaseError(f"it is damaged: {found}")
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error


def open_or_begin_anew(path: Path, opened: Callable[[Path], T]) -> T:
    """Opens a file; where it is damaged it is kept under another name, and a new one is made."""
    try:
        return opened(path)
    except sqlite3.Error as error:
        if not is_damage(error):
            raise
        aside = path.with_name(f"{path.name}.unreadable-{time.time_ns()}")
        logger.error("%s cannot be read (%s): it is kept as %s", path, error, aside.name)
        path.rename(aside)
        for more in ("-wal", "-shm"):
            path.with_name(path.name + more).unlink(missing_ok=True)
        return opened(path)
