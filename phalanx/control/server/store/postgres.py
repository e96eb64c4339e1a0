"""The log in PostgreSQL: the store of a leader and its standby.

The leader holds an advisory lock in the session that it writes with, so a killed leader is
replaced as soon as its connection breaks. One that hangs stops renewing its row; the standby then
ends its session. Every write checks the epoch in its own transaction: a deposed leader cannot.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any

import psycopg

from phalanx.control.server.store.interface import (
    Leadership,
    StoreBusyError,
    StoreError,
    StoreLostError,
    StoreUnusableError,
)
from phalanx.control.server.store.session import DatabaseSession
from phalanx.control.server.store.takeover import SqlStore

LEASE_SECONDS = 5.0  # without a renewal, a leader counts as hung
LOCK = 0x7068616C  # of the advisory lock, with the number of the schema

LEADER = """
CREATE TABLE IF NOT EXISTS leader (
    one BOOLEAN PRIMARY KEY DEFAULT TRUE CHECK (one),
    epoch BIGINT, url TEXT, version TEXT, backend INTEGER, renewed TIMESTAMPTZ);
INSERT INTO leader VALUES (TRUE, 0, '', '', 0, now()) ON CONFLICT DO NOTHING;
"""


class PostgresStore(SqlStore):
    """One session to write, one to read; both are made again when they break."""

    MARK, INTEGER, BLOB, ANCHORED = "%s", "BIGINT", "BYTEA", False

    def __init__(self, url: str, anchor: Path, lease_seconds: float = LEASE_SECONDS) -> None:
        super().__init__(anchor)
        self.url, self.place = url, "PostgreSQL"
        self.lease_seconds = lease_seconds
        self.epoch = 0  # 0: not leading
        self._using, self._reading = Lock(), Lock()
        self._writer = self._connect()
        self._reader = self._connect()
        with self._explained(), self._writer.transaction():
            # Two servers may start together; creating a table twice at once is an error.
            self._writer.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK + 1,))
            if not self._has_table("events"):
                self._create(self._writer.cursor())
            self._writer.execute(LEADER)

    def _connect(self) -> psycopg.Connection[Any]:
        try:
            session = psycopg.connect(
                self.url,
                autocommit=True,
                connect_timeout=5,
                keepalives_idle=5,
                keepalives_interval=2,
                keepalives_count=3,
                application_name="phalanx",
            )
            # The server's side: the lock of a machine that vanished is given back soon.
            session.execute("SET tcp_keepalives_idle = 5; SET tcp_keepalives_interval = 2")
            session.execute("SET tcp_keepalives_count = 3; SET synchronous_commit = on")
            return session
        except psycopg.Error as error:
            raise StoreError(f"cannot reach PostgreSQL: {_one_line(error)}") from None

    def lead(self, url: str, version: str, *, damaged_too: bool = False) -> Leadership:
        """Take the lock (from a leader that hangs, too), judge the log, take the next epoch."""
        try:
            return self._lead(url, version, damaged_too)
        except StoreUnusableError:
            self._give_back()  # somebody may want to repair it
            raise

    def _lead(self, url: str, version: str, damaged_too: bool) -> Leadership:
        with self._using, self._explained():
            if self._writer.closed:
                self._writer = self._connect()
            if not self._take_lock():
                self._end_hung_leader()
                if not self._take_lock():
                    row = self._writer.execute("SELECT url FROM leader").fetchone()
                    raise StoreBusyError("another server leads", row[0] if row else "")
            with self._writer.transaction():
                row = self._writer.execute(
                    "SELECT epoch, version FROM leader FOR UPDATE"
                ).fetchone()
                assert row is not None
                # The leader before can write no more: what is read now is what it left.
                stored, found = self.stored_format(), self._judge(damaged_too)
                self._prepare(self._writer.cursor(), stored, found)
                epoch = max(row[0], found.mark.epoch if found.mark is not None else 0) + 1
                self._writer.execute(
                    "UPDATE leader SET epoch = %s, url = %s, version = %s, "
                    "backend = pg_backend_pid(), renewed = now()",
                    (epoch, url, version),
                )
            self.epoch = epoch
        self._acknowledge(epoch=epoch)
        self._sync_anchor()
        return Leadership(epoch=epoch, version_before=row[1])

    def last_epoch(self) -> int:
        """Of the last leader."""
        rows = self._read("SELECT epoch FROM leader")
        return int(rows[0][0]) if rows else 0

    def _take_lock(self) -> bool:
        row = self._writer.execute("SELECT pg_try_advisory_lock(%s)", (LOCK,)).fetchone()
        return bool(row and row[0])

    def _end_hung_leader(self) -> None:
        row = self._writer.execute(
            "SELECT backend FROM leader WHERE renewed < now() - make_interval(secs => %s)",
            (self.lease_seconds,),
        ).fetchone()
        if row and row[0]:
            self._writer.execute("SELECT pg_terminate_backend(%s)", (row[0],))
            time.sleep(0.1)

    def renew(self) -> None:
        """Say that this leader is well."""
        with self._writing() as cursor:
            cursor.execute("UPDATE leader SET renewed = now()")
        self._sync_anchor()

    def _insert(
        self, session: DatabaseSession, rows: Sequence[tuple[int, int, bytes, bytes]]
    ) -> None:
        try:
            super()._insert(session, rows)
        except psycopg.errors.UniqueViolation:
            text = f"events from {rows[0][0]} on are already there: another server wrote them"
            raise StoreLostError(text) from None

    def close(self) -> None:
        """Give the lock back and close both sessions."""
        self._give_back()
        self._anchor.close()
        for lock, session in ((self._using, self._writer), (self._reading, self._reader)):
            with lock:
                session.close()
        self.epoch = 0

    def _give_back(self) -> None:
        with self._using, suppress(psycopg.Error):
            if not self._writer.closed:
                self._writer.execute("SELECT pg_advisory_unlock_all()")

    def _has_table(self, name: str) -> bool:
        return self._read("SELECT to_regclass(%s)", (name,))[0][0] is not None

    def _read(self, statement: str, values: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        with self._reading, self._explained():
            if self._reader.closed:
                self._reader = self._connect()
            return self._reader.execute(statement, values).fetchall()

    @contextmanager
    def _writing(self) -> Iterator[psycopg.Cursor[Any]]:
        """A transaction of the leader. The row's lock makes a takeover wait for its end."""
        with self._using:
            if not self.epoch:
                raise StoreLostError("this server does not lead")
            with self._explained(), self._writer.transaction(), self._writer.cursor() as cursor:
                row = cursor.execute("SELECT epoch FROM leader FOR SHARE").fetchone()
                if row is None or row[0] != self.epoch:
                    raise StoreLostError(f"another server leads (epoch {row and row[0]})")
                yield cursor

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            if self._writer.closed and self.epoch:
                # The lock went with the session: somebody else may lead by now.
                self.epoch = 0
                raise StoreLostError(
                    f"lost the session to PostgreSQL: {_one_line(error)}"
                ) from None
            raise StoreError(f"PostgreSQL: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
