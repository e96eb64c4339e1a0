"""The log in one SQLite file (WAL, one fsync a commit): the store of a single server."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from phalanx.control.store import (
    CommandRow,
    Lead,
    StoreBusyError,
    StoreError,
    StoreLostError,
)
from phalanx.control.store_sql import SqlStore

SCHEMA = """
CREATE TABLE IF NOT EXISTS events (sequence INTEGER PRIMARY KEY, time_ns INTEGER, body BLOB);
CREATE TABLE IF NOT EXISTS commands (sequence INTEGER PRIMARY KEY, body BLOB);
CREATE TABLE IF NOT EXISTS snapshots
    (sequence INTEGER PRIMARY KEY, version TEXT, core BLOB, answers BLOB);
CREATE TABLE IF NOT EXISTS aside (sequence INTEGER PRIMARY KEY, body BLOB, why TEXT);
CREATE TABLE IF NOT EXISTS epochs
    (epoch INTEGER PRIMARY KEY, url TEXT, version TEXT, started_ns INTEGER);
CREATE TABLE IF NOT EXISTS tokens (id TEXT PRIMARY KEY, record BLOB);
CREATE TABLE IF NOT EXISTS secrets (name TEXT PRIMARY KEY, value BLOB);
"""


class SqliteStore(SqlStore):
    """A file with one writer, kept alone by a lock on a file beside it."""

    MARK = "?"

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock_file = -1
        self._using = Lock()  # readers of the API and the writer share the connection
        with _explained(path):
            # The log holds job specifications of every team: nobody else may read it.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=FULL")
            self._database.executescript(SCHEMA)

    def lead(self, url: str, version: str) -> Lead:
        """Take the lock and the next epoch."""
        self._lock_file = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            leader = os.pread(self._lock_file, 1024, 0).decode(errors="replace")
            os.close(self._lock_file)
            self._lock_file = -1
            where = f"a server already runs on {self.path.parent}" + (f" ({leader})" * bool(leader))
            what = f"{where}: use that one, or give this one another --state"
            raise StoreBusyError(what, leader) from None
        os.ftruncate(self._lock_file, 0)
        os.pwrite(self._lock_file, url.encode(), 0)
        with self._writing() as database:
            row = database.execute(
                "SELECT epoch, version FROM epochs ORDER BY epoch DESC LIMIT 1"
            ).fetchone()
            epoch, before = (row[0] + 1, row[1]) if row else (1, "")
            database.execute(
                "INSERT INTO epochs VALUES (?, ?, ?, ?)", (epoch, url, version, time.time_ns())
            )
        return Lead(epoch=epoch, version_before=before)

    def renew(self) -> None:
        """The lock is held as long as this process lives."""
        if self._lock_file < 0:
            raise StoreLostError("this server does not hold the lock of its store")

    def commands(self, sequences: Sequence[int]) -> list[CommandRow]:
        """What some events gave."""
        if not sequences:
            return []
        rows = self._read(
            "SELECT sequence, body FROM commands WHERE sequence BETWEEN ? AND ? ORDER BY sequence",
            (min(sequences), max(sequences)),
        )
        wanted = set(sequences)
        return [(sequence, body) for sequence, body in rows if sequence in wanted]

    def close(self) -> None:
        """Close the file and let go of its lock."""
        with self._using:
            self._database.close()
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1

    def _read(self, statement: str, values: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        with self._using, _explained(self.path):
            return self._database.execute(statement, values).fetchall()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._using, _explained(self.path):
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                # A commit that fails for want of space leaves the transaction open.
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"{path}: {error}") from error
