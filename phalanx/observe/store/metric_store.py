"""Metrics in one SQLite file: packed blocks of rows, in tiers, each kept for its time.

Appending only touches memory; ``flush`` writes what has come since, in a thread of its own. A
server that is killed loses at most the seconds since the last flush. A full disk, or a file that
cannot be read, costs metrics and nothing else.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Lock

import msgspec
import numpy as np
from msgspec import Struct

from phalanx.observe.store.blocks import pack, unpack
from phalanx.observe.store.sqlite_file import open_or_begin_anew
from phalanx.observe.store.tables import (
    TIERS,
    Array,
    Column,
    MetricTable,
    Rows,
    kind_of,
    statistics,
)

SCHEMA = """
CREATE TABLE IF NOT EXISTS tables
    (id INTEGER PRIMARY KEY, owner TEXT, kind TEXT, generation INTEGER, columns BLOB, facts BLOB,
     created_ns INTEGER, UNIQUE (owner, kind, generation));
CREATE TABLE IF NOT EXISTS blocks
    (id INTEGER PRIMARY KEY, table_id INTEGER, tier INTEGER, first_ns INTEGER, last_ns INTEGER,
     rows INTEGER, small INTEGER, head BLOB);
CREATE INDEX IF NOT EXISTS blocks_by_time ON blocks (table_id, tier, last_ns);
CREATE INDEX IF NOT EXISTS blocks_by_age ON blocks (tier, last_ns);
CREATE TABLE IF NOT EXISTS parts
    (block_id INTEGER, name TEXT, data BLOB, PRIMARY KEY (block_id, name));
"""
MERGE_WINDOWS = 12  # of the time that a tier is kept: blocks of one window are merged
MERGE_BLOCKS = 16  # when there are so many
BLOCK_BYTES = 4 << 20  # of numbers; half as large ones are not merged any more


_columns = msgspec.json.Decoder(tuple[Column, ...])


class TableInfo(Struct, frozen=True):
    """A table that the store knows."""

    id: int
    owner: str
    kind: str
    generation: int
    columns: tuple[Column, ...]
    facts: dict[str, object] = {}  # what a reader must know of its rows: names of nodes, ...

    def column(self, name: str) -> Column | None:
        """A column by its name."""
        return next((each for each in self.columns if each.name == name), None)


class ColumnRows(Struct):
    """Rows of one column."""

    times_ns: Array
    steps: Array
    values: dict[str, Array]  # by statistic: [rows, width]


class MetricStore:
    """One writer (``append``, ``flush``, ``keep``) and any number of readers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        self._database = self._connect()
        self._database.executescript(SCHEMA)
        self._using = Lock()
        self._tables: dict[tuple[str, str, int], MetricTable] = {}
        self._appending = Lock()

    def _connect(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
        database.execute("PRAGMA auto_vacuum=INCREMENTAL")  # before anything is written
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")
        database.execute("PRAGMA mmap_size=1073741824")
        return database

    # Writing.

    def table(
        self,
        owner: str,
        kind: str,
        generation: int,
        columns: Sequence[Column],
        facts: Mapping[str, object] | None = None,
    ) -> MetricTable:
        """The table of this name; made when there is none."""
        key = (owner, kind, generation)
        known = self._tables.get(key)
        if known is not None:
            return known
        with self._using:
            self._database.execute(
                "INSERT OR IGNORE INTO tables (owner, kind, generation, columns, facts, created_ns)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (
                    *key,
                    msgspec.json.encode(tuple(columns)),
                    msgspec.json.encode(dict(facts or {})),
                    time.time_ns(),
                ),
            )
            number, stored = self._database.execute(
                "SELECT id, columns FROM tables WHERE owner = ? AND kind = ? AND generation = ?",
                key,
            ).fetchone()
        with self._appending:
            return self._tables.setdefault(key, MetricTable(number, _columns.decode(stored)))

    def flush(self, *, everything: bool = False) -> None:
        """Store what has come since the last call; what cannot be stored is lost."""
        with self._appending:
            waiting = [
                (table, list(table.take(everything=everything))) for table in self._tables.values()
            ]
        if any(found for _, found in waiting):
            with self._writing() as database:
                for table, found in waiting:
                    for rows in found:
                        _insert(database, table.number, table.columns, rows)

    def forget(self, owner: str) -> None:
        """Nothing more comes for an owner: what waits is stored, its tables are let go."""
        with self._appending:
            gone = [key for key in self._tables if key[0] == owner]
            tables = [self._tables.pop(key) for key in gone]
        with self._writing() as database:
            for table in tables:
                for rows in table.take(everything=True):
                    _insert(database, table.number, table.columns, rows)

    def keep(self, now_ns: int, most_bytes: int = 0) -> None:
        """Merge small blocks, and drop what is older than its tier is kept."""
        self._merge()
        with self._writing() as database:
            for index, tier in enumerate(TIERS):
                _drop(database, "tier = ? AND last_ns < ?", (index, now_ns - tier.keep_ns))
            if most_bytes and self.size_bytes() > most_bytes:
                oldest = "id IN (SELECT id FROM blocks ORDER BY last_ns LIMIT ?)"
                count = database.execute("SELECT count(*) FROM blocks").fetchone()[0]
                _drop(database, oldest, (max(1, count // 10),))
        with self._using:
            self._database.execute("PRAGMA incremental_vacuum").fetchall()

    def size_bytes(self) -> int:
        """Bytes of data in the file."""
        pages, free, size = (
            self._database.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def close(self) -> None:
        """Store what is left."""
        try:
            self.flush(everything=True)
        finally:
            self._database.close()

    def _merge(self) -> None:
        for index, tier in enumerate(TIERS):
            window = tier.keep_ns // MERGE_WINDOWS
            with self._using:
                crowded = self._database.execute(
                    "SELECT table_id, first_ns / ? AS of FROM blocks WHERE tier = ? AND small "
                    "GROUP BY table_id, of HAVING count(*) >= ?",
                    (window, index, MERGE_BLOCKS),
                ).fetchall()
            for number, of in crowded:
                self._merge_window(number, index, of * window, (of + 1) * window)

    def _merge_window(self, number: int, tier: int, from_ns: int, to_ns: int) -> None:
        """Small blocks of a stretch of time become few: none that outlives its tier by much."""
        with self._using:
            (stored,) = self._database.execute(
                "SELECT columns FROM tables WHERE id = ?", (number,)
            ).fetchone()
            blocks = self._database.execute(
                "SELECT id, rows FROM blocks WHERE table_id = ? AND tier = ? AND small "
                "AND first_ns >= ? AND first_ns < ? ORDER BY first_ns",
                (number, tier, from_ns, to_ns),
            ).fetchall()
        columns = _columns.decode(stored)
        row_bytes = _row_bytes(columns)
        chosen, size = [], 0
        for block, rows in blocks:
            chosen.append(block)
            size += rows * row_bytes
            if size >= BLOCK_BYTES or block == blocks[-1][0]:
                joined = _joined(self._database, self._using, columns, tier, chosen)
                with self._writing() as database:
                    _drop(database, f"id IN ({','.join('?' * len(chosen))})", chosen)
                    if joined is not None:
                        _insert(database, number, columns, joined)
                chosen, size = [], 0

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._using:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise

    # Reading.

    def find(self, owner: str, kind: str) -> list[TableInfo]:
        """Tables of an owner, oldest generation first."""
        return [table for table in self.all_tables(owner) if table.kind == kind]

    def owners(self, kind: str) -> set[str]:
        """Whoever has a table of a kind."""
        with closing(self._connect()) as database:
            rows = database.execute("SELECT DISTINCT owner FROM tables WHERE kind = ?", (kind,))
            return {owner for (owner,) in rows}

    def all_tables(self, owner: str) -> list[TableInfo]:
        """Every table of an owner, of any kind."""
        with closing(self._connect()) as database:
            rows = database.execute(
                "SELECT id, owner, kind, generation, columns, facts FROM tables "
                "WHERE owner = ? ORDER BY generation, id",
                (owner,),
            ).fetchall()
        return [
            TableInfo(number, of, what, made, _columns.decode(columns), msgspec.json.decode(facts))
            for number, of, what, made, columns, facts in rows
        ]

    def span(self, table: TableInfo, tier: int) -> tuple[int, int, int]:
        """First and last time of a table's rows in a tier, and their number."""
        with closing(self._connect()) as database:
            first, last, rows = database.execute(
                "SELECT min(first_ns), max(last_ns), sum(rows) FROM blocks "
                "WHERE table_id = ? AND tier = ?",
                (table.id, tier),
            ).fetchone()
        return int(first or 0), int(last or 0), int(rows or 0)

    def read(self, table: TableInfo, name: str, tier: int, from_ns: int, to_ns: int) -> ColumnRows:
        """Rows of a column between two times; damaged blocks are left out."""
        column = table.column(name)
        assert column is not None, name
        wanted = statistics(tier, column)
        times, steps, values = [], [], []
        with closing(self._connect()) as database:
            selected = database.execute(
                "SELECT rows, head, data FROM blocks JOIN parts ON block_id = id AND name = ? "
                "WHERE table_id = ? AND tier = ? AND last_ns >= ? AND first_ns <= ? "
                "ORDER BY first_ns LIMIT 100000",
                (name, table.id, tier, from_ns, to_ns),
            )
            for rows, head, data in selected:
                try:
                    both = unpack(head, "<i8", (2, rows))
                    block = unpack(data, kind_of(tier, column), (rows, len(wanted), column.width))
                except ValueError:
                    continue
                inside = (both[0] >= from_ns) & (both[0] <= to_ns)
                times.append(both[0][inside])
                steps.append(both[1][inside])
                values.append(block[inside])
        if not times:
            empty = np.zeros(0, np.int64)
            return ColumnRows(empty, empty, {each: np.zeros((0, column.width)) for each in wanted})
        together = np.concatenate(values)
        by_statistic = {each: together[:, index] for index, each in enumerate(wanted)}
        return ColumnRows(np.concatenate(times), np.concatenate(steps), by_statistic)


def open_metrics(path: Path) -> MetricStore:
    """The store at a path; one that cannot be read is set aside, since metrics can be missed."""
    return open_or_begin_anew(path, MetricStore)


def _parts(columns: Sequence[Column], rows: Rows) -> dict[str, bytes]:
    with np.errstate(over="ignore"):
        return {
            column.name: pack(rows.values[column.name].astype(kind_of(rows.tier, column)))
            for column in columns
        }


def _insert(
    database: sqlite3.Connection, number: int, columns: Sequence[Column], rows: Rows
) -> None:
    head = pack(np.stack([rows.times_ns, rows.steps]).astype("<i8"))
    first, last = int(rows.times_ns.min()), int(rows.times_ns.max())
    count = len(rows.times_ns)
    small = 2 * count * _row_bytes(columns) < BLOCK_BYTES
    made = database.execute(
        "INSERT INTO blocks (table_id, tier, first_ns, last_ns, rows, small, head) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (number, rows.tier, first, last, count, small, head),
    )
    block = made.lastrowid
    database.executemany(
        "INSERT INTO parts VALUES (?, ?, ?)",
        [(block, name, data) for name, data in _parts(columns, rows).items()],
    )


def _row_bytes(columns: Sequence[Column]) -> int:
    return sum(8 * column.width for column in columns)


def _drop(database: sqlite3.Connection, which: str, values: Sequence[object]) -> None:
    database.execute(
        f"DELETE FROM parts WHERE block_id IN (SELECT id FROM blocks WHERE {which})",
        tuple(values),
    )
    database.execute(f"DELETE FROM blocks WHERE {which}", tuple(values))


def _joined(
    database: sqlite3.Connection,
    using: Lock,
    columns: Sequence[Column],
    tier: int,
    blocks: Sequence[int],
) -> Rows | None:
    heads: list[Array] = []
    values: dict[str, list[Array]] = {column.name: [] for column in columns}
    for block in blocks:
        with using:
            rows, head = database.execute(
                "SELECT rows, head FROM blocks WHERE id = ?", (block,)
            ).fetchone()
            parts = dict(
                database.execute("SELECT name, data FROM parts WHERE block_id = ?", (block,))
            )
        try:
            both = unpack(head, "<i8", (2, rows))
            read = {
                column.name: unpack(
                    parts[column.name],
                    kind_of(tier, column),
                    (rows, len(statistics(tier, column)), column.width),
                )
                for column in columns
            }
        except (ValueError, KeyError):
            continue  # damaged: it goes with the merge
        heads.append(both)
        for name, block_values in read.items():
            values[name].append(block_values)
    if not heads:
        return None
    head_all = np.concatenate(heads, axis=1)
    order = np.argsort(head_all[0], kind="stable")
    return Rows(
        tier,
        head_all[0][order],
        head_all[1][order],
        {name: np.concatenate(found)[order] for name, found in values.items()},
    )
