"""What both databases do with the same statements: the log, its snapshots, tokens, secrets."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from msgspec import structs

from phalanx.control.server.store.anchor import Anchor, AnchorMark
from phalanx.control.server.store.chain import START, StoredEvent, link, seal, together
from phalanx.control.server.store.check import LogKeys, Repair
from phalanx.control.server.store.interface import (
    SECRET_BYTES,
    CommandRow,
    Row,
    StoredSnapshot,
    StoreError,
    body_of,
    sequences,
)
from phalanx.control.server.store.session import DatabaseSession, SqlSession

logger = logging.getLogger("phalanx.server")

SNAPSHOTS_KEPT = 2  # the one before the newest is there should that one be damaged
MOST_ASKED = 500  # tokens of one question


class SqlLog(SqlSession):
    """The parts of a ``Store`` that do not depend on who keeps the rows.

    Whoever leads knows the end of the chain and what ``anchor`` says of it.
    """

    def __init__(self, anchor: Path) -> None:
        self._anchor = Anchor(anchor)
        self._anchor_problem = ""  # why it could not be written; "": it was
        self._marking = Lock()
        self._changing_keys = Lock()
        self._mark = AnchorMark(0, 0)

    def append(self, events: Sequence[Row], commands: Sequence[CommandRow]) -> None:
        """One transaction, durable when this returns."""
        sequence, chain, rows = self._linked(events)
        given = [(number, body, seal("commands", number, body)) for number, body in commands]
        with self._writing() as session:
            self._insert(session, rows)
            session.executemany(
                self._own(
                    "INSERT INTO commands VALUES (?, ?, ?) ON CONFLICT (sequence) "
                    "DO UPDATE SET body = excluded.body, seal = excluded.seal"
                ),
                given,
            )
        self._acknowledge(sequence=sequence, chain=chain)

    def _linked(
        self, events: Sequence[Row]
    ) -> tuple[int, bytes, list[tuple[int, int, bytes, bytes]]]:
        """The end of the chain behind some events, and their rows."""
        sequence, chain, rows = self._mark.sequence, self._mark.chain, []
        for number, time_ns, body in events:
            if number != sequence + 1:
                raise StoreError(f"{sequences(events)} do not follow event {sequence}")
            sequence, chain = number, link(chain, number, time_ns, body)
            rows.append((number, time_ns, body, chain))
        return sequence, chain, rows

    def _insert(
        self, session: DatabaseSession, rows: Sequence[tuple[int, int, bytes, bytes]]
    ) -> None:
        session.executemany(self._own("INSERT INTO events VALUES (?, ?, ?, ?)"), rows)

    def set_aside(self, sequence: int, why: str, time_ns: int | None = None) -> None:
        """Keep the original apart; from now on it counts as a tick."""
        with self._writing() as session:
            session.execute(
                self._own(
                    "INSERT INTO aside SELECT sequence, body, ?, ? FROM events WHERE sequence = ? "
                    "ON CONFLICT (sequence) DO UPDATE SET why = excluded.why, seal = excluded.seal"
                ),
                (why, seal("aside", sequence, why), sequence),
            )
            if time_ns is not None:
                session.execute(
                    self._own("UPDATE events SET time_ns = ? WHERE sequence = ?"),
                    (time_ns, sequence),
                )

    def save_snapshot(self, snapshot: StoredSnapshot) -> None:
        """Keep it and the one before it."""
        chain = self._link_of(snapshot.sequence)
        fields = (snapshot.sequence, snapshot.version, snapshot.core, snapshot.answers, chain)
        with self._writing() as session:
            session.execute(
                self._own(
                    "INSERT INTO snapshots VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (sequence) "
                    "DO UPDATE SET version = excluded.version, core = excluded.core, "
                    "answers = excluded.answers, chain = excluded.chain, seal = excluded.seal"
                ),
                (*fields, seal("snapshot", *fields)),
            )
            session.execute(
                self._own(
                    "DELETE FROM snapshots WHERE sequence NOT IN "
                    "(SELECT sequence FROM snapshots ORDER BY sequence DESC LIMIT ?)"
                ),
                (SNAPSHOTS_KEPT,),
            )

    def _link_of(self, sequence: int) -> bytes:
        if sequence == self._mark.sequence:
            return self._mark.chain
        ends = [(each.sequence, each.chain) for each in self.records(sequence - 1, 1)]
        ends += [(each.sequence, each.chain) for each in self.snapshots()]
        return next((chain for number, chain in ends if number == sequence), START)

    def snapshots(self) -> list[StoredSnapshot]:
        """Those that are whole, newest first."""
        return [kept for _, kept in self._stored_snapshots() if kept is not None]

    def _stored_snapshots(self) -> Iterator[tuple[int, StoredSnapshot | None]]:
        """All of them, newest first; None: damaged."""
        rows = self._read(
            "SELECT sequence, version, core, answers, chain, seal FROM snapshots "
            "ORDER BY sequence DESC"
        )
        for sequence, version, core, answers, chain, sealed in rows:
            whole = seal("snapshot", sequence, version, core, answers, chain) == sealed
            kept = StoredSnapshot(
                sequence=sequence, version=version, core=core, answers=answers, chain=chain
            )
            yield sequence, kept if whole else None

    def drop_snapshot(self, sequence: int) -> None:
        """Forget one that is of no use."""
        with self._writing() as session:
            session.execute(self._own("DELETE FROM snapshots WHERE sequence = ?"), (sequence,))

    def oldest_snapshot(self) -> int:
        """The oldest that is kept."""
        ((sequence,),) = self._read("SELECT min(sequence) FROM snapshots")
        return int(sequence or 0)

    def drop_events(self, until: int) -> None:
        """Up to a sequence, at most to the oldest snapshot."""
        with self._writing() as session:
            for table in ("events", "commands", "aside"):
                session.execute(
                    self._own(
                        f"DELETE FROM {table} WHERE sequence <= ? AND sequence <= "
                        "(SELECT coalesce(min(sequence), 0) FROM snapshots)"
                    ),
                    (until,),
                )

    def events(self, after: int, limit: int) -> list[Row]:
        """Events behind a sequence, oldest first."""
        return [
            (record.sequence, record.time_ns, body_of(record))
            for record in self.records(after, limit)
        ]

    def records(self, after: int, limit: int) -> list[StoredEvent]:
        """As they are stored; what a damaged row has of the wrong type fails its checksum."""
        rows = self._read(
            self._own(
                "SELECT e.sequence, e.time_ns, e.body, e.chain, a.why, a.seal FROM events e "
                "LEFT JOIN aside a ON a.sequence = e.sequence "
                "WHERE e.sequence > ? ORDER BY e.sequence LIMIT ?"
            ),
            (after, limit),
        )
        return [
            StoredEvent(
                sequence,
                time_ns if isinstance(time_ns, int) else 0,
                body if isinstance(body, bytes) else b"",
                chain if isinstance(chain, bytes) else b"",
                sealed is not None and sealed == seal("aside", sequence, why),
            )
            for sequence, time_ns, body, chain, why, sealed in rows
        ]

    def commands(self, sequences: Sequence[int]) -> list[CommandRow]:
        """What some events gave; those whose checksum is wrong are left out."""
        if not sequences:
            return []
        rows = self._read(
            self._own(
                "SELECT sequence, body, seal FROM commands WHERE sequence BETWEEN ? AND ? "
                "ORDER BY sequence"
            ),
            (min(sequences), max(sequences)),
        )
        wanted = set(sequences)
        return [
            (sequence, body)
            for sequence, body, sealed in rows
            if sequence in wanted and seal("commands", sequence, body) == sealed
        ]

    # Tokens and secrets: the anchor knows their checksum, so that none goes missing.

    def tokens(self) -> list[tuple[str, bytes]]:
        """Every token's id and record."""
        rows = self._read("SELECT id, record FROM tokens ORDER BY id")
        return [(token, record) for token, record in rows]

    def put_tokens(self, records: Mapping[str, bytes]) -> None:
        """Keep records of tokens by their ids: all of them, or none."""
        rows = [(token, record, seal("token", token, record)) for token, record in records.items()]
        ids = list(records)
        with self._changing_keys:
            before: list[bytes] = []
            for first in range(0, len(ids), MOST_ASKED):
                asked = ids[first : first + MOST_ASKED]
                marks = ", ".join("?" * len(asked))
                known = self._own(f"SELECT seal FROM tokens WHERE id IN ({marks})")
                before += [row[0] for row in self._read(known, tuple(asked))]
            with self._keys_become(*(row[2] for row in rows), *before) as session:
                session.executemany(
                    self._own(
                        "INSERT INTO tokens VALUES (?, ?, ?) ON CONFLICT (id) "
                        "DO UPDATE SET record = excluded.record, seal = excluded.seal"
                    ),
                    rows,
                )

    def drop_token(self, token: str) -> None:
        """Forget a token."""
        with self._changing_keys:
            before = self._read(self._own("SELECT seal FROM tokens WHERE id = ?"), (token,))
            with self._keys_become(*(row[0] for row in before)) as session:
                session.execute(self._own("DELETE FROM tokens WHERE id = ?"), (token,))

    def secret(self, name: str) -> bytes:
        """Made once, by whoever leads first."""
        statement = self._own("SELECT value FROM secrets WHERE name = ?")
        with self._changing_keys:
            rows = self._read(statement, (name,))
            if rows:
                return bytes(rows[0][0])
            made = secrets.token_bytes(SECRET_BYTES)
            sealed = seal("secret", name, made)
            with self._keys_become(sealed) as session:
                session.execute(
                    self._own("INSERT INTO secrets VALUES (?, ?, ?)"), (name, made, sealed)
                )
            return made

    @contextmanager
    def _keys_become(self, *seals: bytes) -> Iterator[DatabaseSession]:
        """A transaction that adds and takes out rows with these checksums.

        The anchor knows of both outcomes before it, since a kill may come right behind it.
        """
        keys = together((self._mark.keys, *seals))
        self._acknowledge(next_keys=keys)
        with self._writing() as session:
            yield session
        self._acknowledge(keys=keys, next_keys=keys)

    def keys(self) -> LogKeys:
        """Tokens and secrets."""
        whole, damaged = [], []
        for kind, table in (("token", "tokens"), ("secret", "secrets")):
            for row in self._read(f"SELECT * FROM {table}"):
                name, value, sealed = row
                if seal(kind, name, value) == sealed:
                    whole.append(sealed)
                else:
                    damaged.append(str(name))
        return LogKeys(together(whole), tuple(damaged))

    def repairs(self) -> list[Repair]:
        """Cuts that were made on purpose."""
        rows = self._read("SELECT epoch, after_sequence FROM repairs ORDER BY epoch")
        return [Repair(epoch, after) for epoch, after in rows]

    def truncate(self, after: int, what: str) -> None:
        """Forget everything behind an event, and tokens and secrets that are damaged."""
        damaged = self.keys().damaged
        with self._writing() as session:
            for table in ("events", "commands", "aside", "snapshots"):
                session.execute(self._own(f"DELETE FROM {table} WHERE sequence > ?"), (after,))
            for name in damaged:
                session.execute(self._own("DELETE FROM tokens WHERE id = ?"), (name,))
                session.execute(self._own("DELETE FROM secrets WHERE name = ?"), (name,))
            session.execute(
                self._own("INSERT INTO repairs VALUES (?, ?, ?, ?)"),
                (self._mark.epoch, after, time.time_ns(), what),
            )
        keys, chain = self.keys().checksum, self._link_of(after)
        self._acknowledge(sequence=after, chain=chain, keys=keys, next_keys=keys)
        self._sync_anchor()

    # The anchor.

    def _acknowledge(self, **changed: Any) -> None:
        """Note how far the log goes now. What is stored is stored, whether or not this works."""
        with self._marking:
            self._mark = structs.replace(self._mark, **changed)
            self._try_anchor(lambda: self._anchor.write(self._mark))

    def _sync_anchor(self) -> None:
        with self._marking:
            self._try_anchor(self._anchor.sync)

    def _try_anchor(self, act: Callable[[], None]) -> None:
        problem = ""
        try:
            act()
        except OSError as error:
            problem = f"{self._anchor.path}: {error.strerror}"
        if problem and problem != self._anchor_problem:
            logger.error("a loss of the log's end would go unnoticed now: %s", problem)
        self._anchor_problem = problem
