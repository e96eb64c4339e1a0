"""What is known of each node's versions, settings and speed, and since when each is so.

In a file of its own, not in the log: the core decides nothing by it. Losing it loses the past of
these facts; agents tell the present anew.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from phalanx.doctor.acceptance.certificate import Certificate
from phalanx.doctor.drift import Aspect, Drift, NodeFact, find_drift, same_speed
from phalanx.doctor.setup import NodeSetup
from phalanx.hardware.probe.description import NodeDescription
from phalanx.observe.store.sqlite_file import open_or_begin_anew

logger = logging.getLogger("phalanx.server")

FLUSH_SECONDS = 0.5
MOST_SPEEDS = 256  # of a node
MOST_RATE = 1e21  # of one device; what is beyond it was not measured
VERSIONS = ("driver", "cuda", "gpu_firmware", "nic_firmware", "bios", "kernel", "nccl")
# Where a node stands, and what it is called, differs from node to node by design.
OWN = ("leaf", "pod", "rack", "power", "switch", "domain", "partition", "features", "kind")


class Told(NamedTuple):
    """A fact as a node tells it."""

    aspect: Aspect
    key: str
    value: str


class Report(NamedTuple):
    """All facts of one source about a node: those that it does not name any more are gone."""

    node: str
    source: str
    facts: tuple[Told, ...]
    time_ns: int


def described(node: str, description: NodeDescription, now_ns: int) -> Report:
    """Facts of a node's description."""
    facts = (
        Told("version" if fact.key in VERSIONS else "hardware", fact.key, str(fact.value))
        for fact in description.facts
        if fact.key not in OWN
    )
    return Report(node, "description", tuple(facts), now_ns)


def set_up(node: str, setup: NodeSetup, now_ns: int) -> Report:
    """Facts of a node's versions and settings."""
    versions = (Told("version", key, value) for key, value in setup.versions.items())
    settings = (Told("setting", key, value) for key, value in setup.settings.items())
    return Report(node, "setup", (*versions, *settings), now_ns)


def measured(certificate: Certificate, now_ns: int) -> Report:
    """The speeds that a burn-in found."""
    facts = (
        Told("speed", each.key, f"{each.median:.6g}")
        for each in certificate.report.loads[:MOST_SPEEDS]
        if each.samples and not each.problem and 0 < each.median < MOST_RATE
    )
    return Report(certificate.node, "acceptance", tuple(facts), now_ns)


class NodeFactHistory:
    """Facts in a file. Writing and reading happen in threads; the lock keeps them apart."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, str], Report] = {}  # by node and source: the newest
        self._changed = asyncio.Event()
        self._version = 0  # rises with every change
        self._drift: tuple[int, dict[str, str], Drift, frozenset[str]] | None = None
        self._database = open_or_begin_anew(path, _database)

    def note(self, report: Report) -> None:
        """A node told something; it is written soon."""
        self._waiting[report.node, report.source] = report
        self._changed.set()

    async def follow(self) -> None:
        """Writes what was noted, until it is cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            waiting, self._waiting = list(self._waiting.values()), {}
            await asyncio.to_thread(self.store, waiting)
            await asyncio.sleep(FLUSH_SECONDS)

    def store(self, reports: Iterable[Report]) -> None:
        """Keeps what changed; what stayed the same keeps its time."""
        try:
            with self._lock, self._database as database:
                for report in reports:
                    self._version += _store(database, report)
        except sqlite3.Error as error:  # a full disk: the fleet goes on
            logger.warning("facts of nodes could not be kept: %s", error)

    def keep_certificate(self, node: str, time_ns: int, data: bytes) -> None:
        """The newest certificate of a node."""
        with self._lock, self._database as database:
            database.execute(
                "INSERT OR REPLACE INTO certificate VALUES (?, ?, ?)", (node, time_ns, data)
            )

    def certificate(self, node: str) -> bytes | None:
        """The newest certificate of a node, as its agent signed it."""
        with self._lock:
            row = self._database.execute(
                "SELECT data FROM certificate WHERE node = ?", (node,)
            ).fetchone()
        return bytes(row[0]) if row else None

    def drift(self, kinds: dict[str, str]) -> tuple[Drift, frozenset[str]]:
        """Who of these nodes differs, and who of them has told settings; kept while it is so."""
        version, kept = self._version, self._drift
        if kept is None or kept[:2] != (version, kinds):
            facts = self.facts(kinds)
            told = frozenset(fact.node for fact in facts if fact.aspect == "setting")
            kept = self._drift = version, kinds, find_drift(facts), told
        return kept[2], kept[3]

    def facts(self, kinds: dict[str, str]) -> list[NodeFact]:
        """All facts of these nodes, whose kinds are given by name."""
        with self._lock:
            rows = self._database.execute(
                "SELECT node, aspect, key, value, since_ns, before FROM fact"
            ).fetchall()
        return [
            NodeFact(
                node=node,
                kind=kinds[node],
                aspect=aspect,
                key=key,
                value=value,
                since_ns=since_ns,
                before=before,
            )
            for node, aspect, key, value, since_ns, before in rows
            if node in kinds
        ]

    def close(self) -> None:
        """Write what waits, and let go of the file."""
        self.store(self._waiting.values())
        with self._lock, suppress(sqlite3.Error):
            self._database.close()


def _store(database: sqlite3.Connection, report: Report) -> int:
    """How many facts changed."""
    changes = database.total_changes
    rows = database.execute(
        "SELECT aspect, key, value FROM fact WHERE node = ? AND source = ?",
        (report.node, report.source),
    )
    known = {(aspect, key): value for aspect, key, value in rows}
    for aspect, key, value in report.facts:
        old = known.pop((aspect, key), None)
        if old == value or (old is not None and aspect == "speed" and same_speed(old, value)):
            continue
        database.execute(
            "INSERT OR REPLACE INTO fact VALUES (?, ?, ?, ?, ?, ?, ?)",
            (report.node, report.source, aspect, key, value, report.time_ns, old or ""),
        )
    for aspect, key in known:
        database.execute(
            "DELETE FROM fact WHERE node = ? AND source = ? AND aspect = ? AND key = ?",
            (report.node, report.source, aspect, key),
        )
    return database.total_changes - changes


def _database(path: Path) -> sqlite3.Connection:
    path.touch(mode=0o600)
    database = sqlite3.connect(path, check_same_thread=False)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=OFF")
    database.execute(
        "CREATE TABLE IF NOT EXISTS fact (node TEXT NOT NULL, source TEXT NOT NULL,"
        " aspect TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL, since_ns INTEGER NOT NULL,"
        " before TEXT NOT NULL, PRIMARY KEY (node, source, aspect, key)) WITHOUT ROWID"
    )
    database.execute(
        "CREATE TABLE IF NOT EXISTS certificate"
        " (node TEXT PRIMARY KEY, time_ns INTEGER NOT NULL, data BLOB NOT NULL)"
    )
    database.commit()
    return database
