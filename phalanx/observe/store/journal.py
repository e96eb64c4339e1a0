"""What the server remembers of runs for good: their description, findings, the ledger over time.

Small rows in a SQLite file of their own, apart from metrics, which are thinned out.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import msgspec

from phalanx.observe.store.sqlite_file import check_whole, open_or_begin_anew
from phalanx.observe.tracker.findings import RunFinding
from phalanx.observe.tracker.runs import Run

SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (job INTEGER PRIMARY KEY, team TEXT, body BLOB);
CREATE TABLE IF NOT EXISTS findings
    (id INTEGER PRIMARY KEY, time_ns INTEGER, job INTEGER, kind TEXT, body BLOB);
CREATE INDEX IF NOT EXISTS findings_by_job ON findings (job, time_ns);
CREATE TABLE IF NOT EXISTS ledger
    (time_ns INTEGER, owner TEXT, body BLOB, PRIMARY KEY (owner, time_ns)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS kept
    (kind TEXT, name TEXT, body BLOB, PRIMARY KEY (kind, name)) WITHOUT ROWID;
"""
MOST_FINDINGS = 100_000
Buckets = dict[str, int]

_run = msgspec.json.Decoder(Run).decode
_finding = msgspec.json.Decoder(RunFinding).decode
_buckets = msgspec.json.Decoder(dict[str, int]).decode  # integers of msgpack end at 2**64


class Journal:
    """One file, any thread."""

    def __init__(self, path: Path) -> None:
        path.touch(mode=0o600)
        self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")
        self._database.executescript(SCHEMA)
        check_whole(self._database)
        self._using = Lock()

    # Runs.

    def put_run(self, job: int, run: Run) -> None:
        """Keep what is known of a job's run."""
        self._write(
            "INSERT OR REPLACE INTO runs VALUES (?, ?, ?)",
            (job, run.team, msgspec.json.encode(run)),
        )

    def run(self, job: int) -> Run | None:
        """The run of a job."""
        rows = self._read("SELECT body FROM runs WHERE job = ?", (job,))
        return _run(rows[0][0]) if rows else None

    def runs(self, after: int, limit: int) -> list[tuple[int, Run]]:
        """Runs with higher job numbers, in their order."""
        rows = self._read(
            "SELECT job, body FROM runs WHERE job > ? ORDER BY job LIMIT ?", (after, limit)
        )
        return [(job, _run(body)) for job, body in rows]

    def newest_runs(self, limit: int) -> list[tuple[int, bytes]]:
        """The runs with the highest job numbers, in their order, as they are stored."""
        rows = self._read("SELECT job, body FROM runs ORDER BY job DESC LIMIT ?", (limit,))
        return rows[::-1]

    # Findings.

    def add_finding(self, finding: RunFinding) -> None:
        """Keep a finding; of too many, the newest."""
        made = self._write(
            "INSERT INTO findings (time_ns, job, kind, body) VALUES (?, ?, ?, ?)",
            (int(finding.time * 1e9), finding.job, finding.kind, msgspec.json.encode(finding)),
        )
        if made % 1000 == 0:
            self._write("DELETE FROM findings WHERE id <= ?", (made - MOST_FINDINGS,))

    def findings(self, job: int = 0, limit: int = 200, after_ns: int = 0) -> list[RunFinding]:
        """Newest last; of one job, or of all."""
        which, values = "time_ns >= ?", [after_ns]
        if job:
            which, values = f"{which} AND job = ?", [*values, job]
        rows = self._read(
            f"SELECT body FROM findings WHERE {which} ORDER BY id DESC LIMIT ?", (*values, limit)
        )
        return [_finding(body) for (body,) in reversed(rows)]

    # Small things that people keep by name: views of the page, rules of alerts.

    def keep(self, kind: str, name: str, body: bytes) -> None:
        """Keep something under its name, in place of what was there."""
        self._write("INSERT OR REPLACE INTO kept VALUES (?, ?, ?)", (kind, name, body))

    def kept(self, kind: str) -> list[tuple[str, bytes]]:
        """Everything of a kind, by name."""
        return self._read("SELECT name, body FROM kept WHERE kind = ? ORDER BY name", (kind,))

    def drop(self, kind: str, name: str) -> None:
        """Keep it no longer."""
        self._write("DELETE FROM kept WHERE kind = ? AND name = ?", (kind, name))

    # The ledger.

    def note_ledger(self, time_ns: int, owners: dict[str, Buckets]) -> None:
        """Sums so far, in GPU-nanoseconds by bucket, of each owner."""
        rows = [(time_ns, name, msgspec.json.encode(sums)) for name, sums in owners.items()]
        with self._using:
            self._database.executemany("INSERT OR REPLACE INTO ledger VALUES (?, ?, ?)", rows)

    def ledger(self, owner: str, from_ns: int, to_ns: int) -> list[tuple[int, Buckets]]:
        """Sums of an owner over time; begins with the last ones before the time asked for."""
        before = self._read(
            "SELECT time_ns, body FROM ledger WHERE owner = ? AND time_ns <= ? "
            "ORDER BY time_ns DESC LIMIT 1",
            (owner, from_ns),
        )
        rows = self._read(
            "SELECT time_ns, body FROM ledger WHERE owner = ? AND time_ns > ? AND time_ns <= ? "
            "ORDER BY time_ns",
            (owner, from_ns, to_ns),
        )
        return [(time_ns, _buckets(body)) for time_ns, body in [*before, *rows]]

    def thin_ledger(self, now_ns: int, fine_ns: int, step_ns: int) -> None:
        """Of old sums keep one a step."""
        self._write(
            "DELETE FROM ledger WHERE time_ns < ? AND (owner, time_ns) NOT IN (SELECT owner, "
            "max(time_ns) FROM ledger WHERE time_ns < ? GROUP BY owner, time_ns / ?)",
            (now_ns - fine_ns, now_ns - fine_ns, step_ns),
        )

    def close(self) -> None:
        """Close the file."""
        with self._using:
            self._database.close()

    def _write(self, statement: str, values: Sequence[object]) -> int:
        with self._using:
            return self._database.execute(statement, tuple(values)).lastrowid or 0

    def _read(self, statement: str, values: Sequence[object]) -> list[tuple]:  # type: ignore[type-arg]
        with self._using:
            return self._database.execute(statement, tuple(values)).fetchall()


def open_journal(path: Path) -> Journal:
    """The journal at a path; a damaged one is set aside, since jobs matter more than its words."""
    return open_or_begin_anew(path, Journal)
