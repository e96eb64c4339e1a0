"""The log in one SQLite file (WAL, one fsync a commit): the store of a single server."""

from __future__ import annotations

import fcntl
import os
import secrets
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from phalanx.control.store import (
    SECRET_BYTES,
    CommandRow,
    Lead,
    Row,
    Snapshot,
    StoreBusyError,
    StoreError,
    StoreLostError,
)

SNAPSHOTS_KEPT = 2  # the one before the newest is there should that one be damaged

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


class SqliteStore:
    """A file with one writer, kept alone by a lock on a file beside it."""

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
        with self._transaction() as database:
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

    def append(self, events: Sequence[Row], commands: Sequence[CommandRow]) -> None:
        """One transaction, one fsync."""
        with self._transaction() as database:
            database.executemany("INSERT INTO events VALUES (?, ?, ?)", events)
            database.executemany("INSERT OR REPLACE INTO commands VALUES (?, ?)", commands)

    def set_aside(self, sequence: int, body: bytes, why: str) -> None:
        """Keep the original apart and replace it."""
        with self._transaction() as database:
            database.execute(
                "INSERT OR REPLACE INTO aside SELECT sequence, body, ? FROM events "
                "WHERE sequence = ?",
                (why, sequence),
            )
            database.execute("UPDATE events SET body = ? WHERE sequence = ?", (body, sequence))

    def save_snapshot(self, snapshot: Snapshot) -> None:
        """Keep it and the one before it."""
        with self._transaction() as database:
            database.execute(
                "INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?)",
                (snapshot.sequence, snapshot.version, snapshot.core, snapshot.answers),
            )
            database.execute(
                "DELETE FROM snapshots WHERE sequence NOT IN "
                "(SELECT sequence FROM snapshots ORDER BY sequence DESC LIMIT ?)",
                (SNAPSHOTS_KEPT,),
            )

    def last_snapshot(self) -> Snapshot | None:
        """The newest one."""
        rows = self._read(
            "SELECT sequence, version, core, answers FROM snapshots ORDER BY sequence DESC LIMIT 1"
        )
        for sequence, version, core, answers in rows:
            return Snapshot(sequence=sequence, version=version, core=core, answers=answers)
        return None

    def oldest_snapshot(self) -> int:
        """The oldest that is kept."""
        ((sequence,),) = self._read("SELECT min(sequence) FROM snapshots")
        return int(sequence or 0)

    def drop_events(self, until: int) -> None:
        """Up to a sequence, at most to the oldest snapshot."""
        with self._transaction() as database:
            for table in ("events", "commands"):
                database.execute(
                    f"DELETE FROM {table} WHERE sequence <= ? AND sequence <= "
                    "(SELECT coalesce(min(sequence), 0) FROM snapshots)",
                    (until,),
                )

    def events(self, after: int, limit: int) -> list[Row]:
        """Events behind a sequence, oldest first."""
        return self._read(
            "SELECT sequence, time_ns, body FROM events WHERE sequence > ? "
            "ORDER BY sequence LIMIT ?",
            (after, limit),
        )

    def commands(self, sequences: Sequence[int]) -> list[CommandRow]:
        """What some events gave."""
        if not sequences:
            return []
        rows = self._read(
            "SELECT sequence, body FROM commands WHERE sequence BETWEEN ? AND ? ORDER BY sequence",
            (min(sequences), max(sequences)),
        )
        wanted = set(sequences)
        return [row for row in rows if row[0] in wanted]

    def tokens(self) -> list[tuple[str, bytes]]:
        """Every token's id and record."""
        return self._read("SELECT id, record FROM tokens ORDER BY id")

    def put_token(self, token: str, record: bytes) -> None:
        """Keep the record of a token."""
        with self._transaction() as database:
            database.execute("INSERT OR REPLACE INTO tokens VALUES (?, ?)", (token, record))

    def secret(self, name: str) -> bytes:
        """Made once."""
        made = secrets.token_bytes(SECRET_BYTES)
        with self._transaction() as database:
            database.execute("INSERT OR IGNORE INTO secrets VALUES (?, ?)", (name, made))
        ((value,),) = self._read("SELECT value FROM secrets WHERE name = ?", (name,))
        return bytes(value)

    def close(self) -> None:
        """Close the file and let go of its lock."""
        with self._using:
            self._database.close()
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1

    def _read(self, statement: str, values: tuple[object, ...] = ()) -> list[tuple]:  # type: ignore[type-arg]
        with self._using, _explained(self.path):
            return self._database.execute(statement, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
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
