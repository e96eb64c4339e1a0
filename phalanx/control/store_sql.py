"""What both databases do with the same statements: the log, its snapshots, tokens, secrets."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

from phalanx.control.store import SECRET_BYTES, CommandRow, Row, Snapshot

SNAPSHOTS_KEPT = 2  # the one before the newest is there should that one be damaged


class Session(Protocol):
    """A connection, or a cursor of one, inside a transaction."""

    def execute(self, statement: Any, values: Any = ..., /) -> Any:
        """One statement."""

    def executemany(self, statement: Any, rows: Iterable[Any], /) -> Any:
        """One statement for many rows."""


class SqlStore(ABC):
    """The parts of a ``Store`` that do not depend on who keeps the rows."""

    MARK: ClassVar[str]  # of a value in a statement, which is written with "?" here

    @abstractmethod
    def _writing(self) -> AbstractContextManager[Session]:
        """A transaction of the leader; its errors come as ``StoreError``."""

    @abstractmethod
    def _read(self, statement: str, values: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        """The rows of a query in this database's own writing."""

    def append(self, events: Sequence[Row], commands: Sequence[CommandRow]) -> None:
        """One transaction, durable when this returns."""
        with self._writing() as session:
            self._insert(session, events)
            session.executemany(
                self._own(
                    "INSERT INTO commands VALUES (?, ?) ON CONFLICT (sequence) "
                    "DO UPDATE SET body = excluded.body"
                ),
                commands,
            )

    def _insert(self, session: Session, events: Sequence[Row]) -> None:
        session.executemany(self._own("INSERT INTO events VALUES (?, ?, ?)"), events)

    def set_aside(self, sequence: int, body: bytes, why: str) -> None:
        """Keep the original apart and replace it."""
        with self._writing() as session:
            session.execute(
                self._own(
                    "INSERT INTO aside SELECT sequence, body, ? FROM events WHERE sequence = ? "
                    "ON CONFLICT DO NOTHING"
                ),
                (why, sequence),
            )
            session.execute(
                self._own("UPDATE events SET body = ? WHERE sequence = ?"), (body, sequence)
            )

    def save_snapshot(self, snapshot: Snapshot) -> None:
        """Keep it and the one before it."""
        with self._writing() as session:
            session.execute(
                self._own(
                    "INSERT INTO snapshots VALUES (?, ?, ?, ?) ON CONFLICT (sequence) DO UPDATE "
                    "SET version = excluded.version, core = excluded.core, "
                    "answers = excluded.answers"
                ),
                (snapshot.sequence, snapshot.version, snapshot.core, snapshot.answers),
            )
            session.execute(
                self._own(
                    "DELETE FROM snapshots WHERE sequence NOT IN "
                    "(SELECT sequence FROM snapshots ORDER BY sequence DESC LIMIT ?)"
                ),
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
        with self._writing() as session:
            for table in ("events", "commands"):
                session.execute(
                    self._own(
                        f"DELETE FROM {table} WHERE sequence <= ? AND sequence <= "
                        "(SELECT coalesce(min(sequence), 0) FROM snapshots)"
                    ),
                    (until,),
                )

    def events(self, after: int, limit: int) -> list[Row]:
        """Events behind a sequence, oldest first."""
        statement = "SELECT sequence, time_ns, body FROM events WHERE sequence > ? "
        rows = self._read(self._own(statement + "ORDER BY sequence LIMIT ?"), (after, limit))
        return [(sequence, time_ns, body) for sequence, time_ns, body in rows]

    def tokens(self) -> list[tuple[str, bytes]]:
        """Every token's id and record."""
        rows = self._read("SELECT id, record FROM tokens ORDER BY id")
        return [(token, record) for token, record in rows]

    def put_token(self, token: str, record: bytes) -> None:
        """Keep the record of a token."""
        with self._writing() as session:
            session.execute(
                self._own(
                    "INSERT INTO tokens VALUES (?, ?) ON CONFLICT (id) "
                    "DO UPDATE SET record = excluded.record"
                ),
                (token, record),
            )

    def secret(self, name: str) -> bytes:
        """Made once, by whoever leads first."""
        made = secrets.token_bytes(SECRET_BYTES)
        with self._writing() as session:
            session.execute(
                self._own("INSERT INTO secrets VALUES (?, ?) ON CONFLICT DO NOTHING"), (name, made)
            )
        ((value,),) = self._read(self._own("SELECT value FROM secrets WHERE name = ?"), (name,))
        return bytes(value)

    def _own(self, statement: str) -> str:
        return statement.replace("?", self.MARK)
