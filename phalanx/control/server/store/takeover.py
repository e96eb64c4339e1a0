"""What a leader does before it writes: it refuses a damaged log and upgrades an old one.

Nothing is written before the log has been judged, so that whatever can be saved still can be.
"""

from __future__ import annotations

import logging

from phalanx import __version__
from phalanx.cluster.snapshot import FORMAT_VERSION, OLDEST_FORMAT
from phalanx.control.server.store.anchor import AnchorError, AnchorMark
from phalanx.control.server.store.chain import START, link, seal, together
from phalanx.control.server.store.check import Damage, ExaminedLog, LogFinding, LogKeys, examine
from phalanx.control.server.store.interface import (
    RECORDS_A_PAGE,
    StoreDamagedError,
    StoreError,
    StoreFormatError,
)
from phalanx.control.server.store.schema import (
    CHECKSUMS,
    FORMAT_TABLES,
    NEW_FORMAT,
    TABLES,
    statements,
)
from phalanx.control.server.store.session import DatabaseSession
from phalanx.control.server.store.sql import SqlLog

logger = logging.getLogger("phalanx.server")

FIRST_WITH_CHECKSUMS = 2
MOST_TOLD = 3  # findings in a refusal; `repair` shows all


class SqlStore(SqlLog):
    """A log that can be taken over."""

    def examined(self) -> ExaminedLog:
        """The log as it is, whatever is wrong with it; StoreFormatError where it cannot be read."""
        stored = self.stored_format()
        mark, bad_anchor = self._read_mark()
        if stored < FIRST_WITH_CHECKSUMS:
            result = ExaminedLog(mark=mark, epoch=self.last_epoch() if stored else 0)
            last = self._read("SELECT max(sequence) FROM events") if stored else [(0,)]
            result.sequence = result.sound = int(last[0][0] or 0)
            if mark is not None and mark.sequence > result.sequence:
                result.findings.append(LogFinding(Damage.END, result.sequence + 1, mark.sequence))
            elif mark is not None and mark.epoch > result.epoch:
                result.findings.append(LogFinding(Damage.EPOCH, mark.epoch, mark.epoch))
            return result
        result = examine(self, mark, anchored=self.ANCHORED, bad_anchor=bad_anchor)
        result.damaged_snapshots = [
            sequence for sequence, kept in self._stored_snapshots() if kept is None
        ]
        return result

    def stored_format(self) -> int:
        """Of the log; 0: there is none. StoreFormatError where this version cannot follow."""
        if not self._has_table("log_format"):
            return 1 if self._has_table("events") else 0
        rows = self._read("SELECT version, package FROM log_format")
        version, package = rows[0] if rows else (None, "")
        if not isinstance(version, int):
            raise StoreDamagedError(f"{self.place}: the format of the log is not known any more")
        if not OLDEST_FORMAT <= version <= FORMAT_VERSION:
            raise StoreFormatError(
                f"{self.place} was written by phalanx {package or '?'} (log format {version}); "
                f"this is phalanx {__version__}, which reads formats {OLDEST_FORMAT} to "
                f"{FORMAT_VERSION}: start phalanx {package or 'that version'} here, or restore a "
                "backup from before it was started; nothing was changed"
            )
        return version

    def _read_mark(self) -> tuple[AnchorMark | None, bool]:
        try:
            return self._anchor.read(), False
        except AnchorError:
            return None, True
        except OSError as error:
            raise StoreError(f"{self._anchor.path}: {error.strerror}") from None

    def _judge(self, damaged_too: bool) -> ExaminedLog:
        """Refuses a log that lacks what was acknowledged."""
        found = self.examined()
        if found.findings and not damaged_too:
            raise StoreDamagedError(self.refusal(found.findings))
        return found

    def refusal(self, findings: list[LogFinding]) -> str:
        """Why a damaged log is not used, and what can be done."""
        told = [str(each) for each in findings[:MOST_TOLD]]
        more = len(findings) - len(told)
        what = "; ".join(told) + (f"; and {more} more" if more else "")
        return (
            f"the log in {self.place} is damaged: {what}. Nothing was changed: restore a backup, "
            "or run `phalanx server repair`, which shows what can be kept and what would be lost"
        )

    def _create(self, session: DatabaseSession) -> None:
        for each in self._script(TABLES + FORMAT_TABLES + NEW_FORMAT):
            session.execute(each)

    def _script(self, text: str) -> list[str]:
        return statements(text, self.INTEGER, self.BLOB)

    def _prepare(self, session: DatabaseSession, stored: int, examined: ExaminedLog) -> None:
        """In the leader's first transaction: tables of today, no damaged snapshots, a first mark.

        The mark is written before the commit and is true with and without it.
        """
        if stored < FIRST_WITH_CHECKSUMS:
            if stored:
                logger.info("upgrading the log in %s to format %d", self.place, FORMAT_VERSION)
                self._add_checksums(session, examined)
            self._create(session)
        session.execute(
            self._own("UPDATE log_format SET version = ?, package = ?"),
            (FORMAT_VERSION, __version__),
        )
        for sequence in examined.damaged_snapshots:
            logger.error("the snapshot at event %d is damaged: it is not used", sequence)
            session.execute(self._own("DELETE FROM snapshots WHERE sequence = ?"), (sequence,))
        keys = examined.keys.checksum
        try:
            self._mark = AnchorMark(examined.epoch, examined.sequence, examined.chain, keys, keys)
            self._anchor.write(self._mark)
            self._anchor.sync()
        except OSError as error:
            raise StoreError(f"{self._anchor.path}: {error.strerror}") from None

    def _add_checksums(self, session: DatabaseSession, examined: ExaminedLog) -> None:
        """Format 1 becomes 2: what is there now is taken as it is, and protected from here on."""
        for each in self._script(CHECKSUMS):
            session.execute(each)
        rows = session.execute("SELECT sequence, version, core, answers FROM snapshots").fetchall()
        links = self._chain_up(session, examined, [row[0] for row in rows])
        update = self._own("UPDATE snapshots SET chain = ?, seal = ? WHERE sequence = ?")
        for row in rows:
            chain = links.get(row[0], START)
            session.execute(update, (chain, seal("snapshot", *row, chain), row[0]))
        seals = []
        for kind, table, key, value in (
            ("commands", "commands", "sequence", "body"),
            ("aside", "aside", "sequence", "why"),
            ("token", "tokens", "id", "record"),
            ("secret", "secrets", "name", "value"),
        ):
            rows = session.execute(f"SELECT {key}, {value} FROM {table}").fetchall()
            sealed = [(seal(kind, *row), row[0]) for row in rows]
            session.executemany(self._own(f"UPDATE {table} SET seal = ? WHERE {key} = ?"), sealed)
            seals += [each for each, _ in sealed if kind in ("token", "secret")]
        examined.keys = LogKeys(together(seals), ())

    def _chain_up(
        self, session: DatabaseSession, examined: ExaminedLog, snapshots: list[int]
    ) -> dict[int, bytes]:
        """Checksums for events that have none; returns those at which there is a snapshot."""
        (first,) = session.execute("SELECT min(sequence) FROM events").fetchone()
        examined.sequence = (first or max(snapshots, default=0) + 1) - 1
        examined.chain, links = START, {examined.sequence: START}
        page = self._own(
            "SELECT sequence, time_ns, body FROM events WHERE sequence > ? "
            "ORDER BY sequence LIMIT ?"
        )
        while rows := session.execute(page, (examined.sequence, RECORDS_A_PAGE)).fetchall():
            updates = []
            for sequence, time_ns, body in rows:
                if sequence != examined.sequence + 1 or not isinstance(body, bytes):
                    gap = LogFinding(Damage.MISSING, examined.sequence + 1, sequence)
                    raise StoreDamagedError(self.refusal([gap]))
                examined.sequence, examined.chain = (
                    sequence,
                    link(examined.chain, sequence, time_ns, body),
                )
                updates.append((examined.chain, sequence))
                if sequence in snapshots:
                    links[sequence] = examined.chain
            session.executemany(
                self._own("UPDATE events SET chain = ? WHERE sequence = ?"), updates
            )
        return links
