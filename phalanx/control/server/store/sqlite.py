"""The log in one SQLite file (WAL, one fsync a commit): the store of a single server."""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from phalanx.control.server.store.check import Damage, LogFinding
from phalanx.control.server.store.interface import (
    Leadership,
    StoreBusyError,
    StoreDamagedError,
    StoreError,
    StoreLostError,
    full_disk_advice,
)
from phalanx.control.server.store.takeover import SqlStore

EPOCHS = """
CREATE TABLE IF NOT EXISTS epochs
    (epoch INTEGER PRIMARY KEY, url TEXT, version TEXT, started_ns INTEGER);
"""
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class SqliteStore(SqlStore):
    """A file with one writer, kept alone by a lock on a file beside it.

    It is opened to be read; only a leader that has judged it opens it to write, because SQLite
    throws away what it cannot use of a WAL as soon as somebody writes.
    """

    MARK, INTEGER, BLOB, ANCHORED = "?", "INTEGER", "BLOB", True

    def __init__(self, path: Path) -> None:
        super().__init__(path.with_suffix(".anchor"))
        self.path, self.place = path, str(path.parent)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock_file = -1
        self._using = Lock()  # readers of the API and the writer share the connection
        new = not path.exists() or not path.stat().st_size
        if new:
            self._refuse_to_begin_anew()
        with _explained(path):
            # The log holds job specifications of every team: nobody else may read it.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._database = self._connect(writable=new)
            if new:
                with _transaction(self._database):
                    self._create(self._database)
        self.stored_format()  # a file that is no database is refused now

    def _refuse_to_begin_anew(self) -> None:
        mark, _ = self._read_mark()
        if mark is not None and mark.epoch:
            gone = LogFinding(Damage.END, 1, mark.sequence)
            raise StoreDamagedError(f"{self.path} is missing or empty; {self.refusal([gone])}")

    def _connect(self, writable: bool) -> sqlite3.Connection:
        address = f"{self.path.absolute().as_uri()}?mode={'rw' if writable else 'ro'}"
        database = sqlite3.connect(address, uri=True, check_same_thread=False, isolation_level=None)
        if writable:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=FULL")
        return database

    def _create(self, session: Any) -> None:
        super()._create(session)
        session.execute(EPOCHS)

    def lead(self, url: str, version: str, *, damaged_too: bool = False) -> Leadership:
        """Take the lock, judge the log and take the next epoch."""
        self._take_lock(url)
        try:
            stored, examined = self.stored_format(), self._judge(damaged_too)
            with self._using, _explained(self.path):
                read_only, self._database = self._database, self._connect(writable=True)
                read_only.close()
            with self._writing() as database:
                self._prepare(database, stored, examined)
                row = database.execute(
                    "SELECT epoch, version FROM epochs ORDER BY epoch DESC LIMIT 1"
                ).fetchone()
                epoch, before = (row[0], row[1]) if row else (0, "")
                epoch = max(epoch, examined.mark.epoch if examined.mark is not None else 0) + 1
                database.execute(
                    "INSERT INTO epochs VALUES (?, ?, ?, ?)", (epoch, url, version, time.time_ns())
                )
        except BaseException:
            self._let_go()
            raise
        self._acknowledge(epoch=epoch)
        self._sync_anchor()
        return Leadership(epoch=epoch, version_before=before)

    def _take_lock(self, url: str) -> None:
        if self._lock_file >= 0:
            return
        with _explained(self.path):
            handle = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            leader = os.pread(handle, 1024, 0).decode(errors="replace")
            os.close(handle)
            where = f"a server already runs on {self.path.parent}" + (f" ({leader})" * bool(leader))
            what = f"{where}: use that one, or give this one another --state"
            raise StoreBusyError(what, leader) from None
        self._lock_file = handle
        try:
            with _explained(self.path):
                os.ftruncate(handle, 0)
                os.pwrite(handle, url.encode(), 0)
        except StoreError:
            self._let_go()
            raise

    def _let_go(self) -> None:
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1

    def last_epoch(self) -> int:
        """Of the last leader."""
        ((epoch,),) = self._read("SELECT max(epoch) FROM epochs")
        return int(epoch or 0)

    def renew(self) -> None:
        """The lock is held as long as this process lives."""
        if self._lock_file < 0:
            raise StoreLostError("this server does not hold the lock of its store")
        self._sync_anchor()

    def copy_apart(self) -> Path:
        """A copy of the files as they are, for whoever wants to look into them later.

        StoreBusyError where a server runs on them.
        """
        self._take_lock("")
        folder = self.path.parent / f"log-before-repair-{time.time_ns()}"
        with _explained(folder):
            folder.mkdir(mode=0o700)
            for suffix in ("", "-wal"):
                source = self.path.with_name(self.path.name + suffix)
                if source.exists():
                    shutil.copy2(source, folder)
            if self._anchor.path.exists():
                shutil.copy2(self._anchor.path, folder)
        return folder

    def close(self) -> None:
        """Close the file and let go of its lock."""
        with self._using:
            self._database.close()
        self._anchor.close()
        self._let_go()

    def _has_table(self, name: str) -> bool:
        return bool(self._read("SELECT 1 FROM sqlite_master WHERE name = ?", (name,)))

    def _read(self, statement: str, values: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        with self._using, _explained(self.path):
            return self._database.execute(statement, values).fetchall()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        if self._lock_file < 0:
            raise StoreLostError("this server does not hold the lock of its store")
        with self._using, _explained(self.path), _transaction(self._database):
            yield self._database


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        # A commit that fails for want of space leaves the transaction open.
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        code = getattr(error, "sqlite_errorcode", 0) or 0
        if code & 0xFF in DAMAGED:
            raise StoreDamagedError(
                f"{path}: {error}. Nothing was changed: restore a backup "
                "(docs/how-to/back-up-and-restore.md)"
            ) from error
        raise StoreError(f"{path}: {error}{full_disk_advice(path.parent)}") from error
