"""The audit log: who asked for what, and what came of it. Tokens themselves never stand in it.

Every line carries the hash of the line before it, through all files, and ``audit.anchor`` has the
last one: a line that was changed, left out or cut off is noticed (``audit_check.py``). A refusal
that is repeated is written once and then counted, and only files of a certain age ever go, so
nobody can push out what others did.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct, structs

from phalanx.control.server.security.request_limits import RateLimit

logger = logging.getLogger("phalanx.server")

NAME, ANCHOR = "audit.jsonl", "audit.anchor"
ROTATE_BYTES = 64 << 20
START = "0" * 64  # what the very first line carries
COUNT_SECONDS = 60.0  # refusals of one kind and caller are counted so long
MOST_COUNTED = 10_000  # kinds of them at a time
UNKNOWN_PER_SECOND, UNKNOWN_BURST = 5.0, 500  # lines about callers without a token, in all
DAY_NS = 86_400 * 10**9
BOUNDS = {"action": 256, "token": 64, "name": 128, "role": 16, "client": 64, "detail": 512}


class AuditRetention(Struct, frozen=True, kw_only=True):
    """How long lines are kept."""

    days: float = 400.0  # older files go; 0: never
    most_bytes: int = 8 << 30  # beyond it the oldest go, if they are old enough
    least_days: float = 30.0  # nothing younger ever goes


class AuditEntry(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the audit log."""

    number: int
    before: str  # hash of the line before it
    time_ns: int
    action: str  # method and path, or what the server did by itself
    status: int
    token: str = ""  # its id
    name: str = ""
    role: str = ""
    client: str = ""
    detail: str = ""
    count: int = 1  # of the same within a minute
    since_ns: int = 0  # the first of these


class AuditHead(NamedTuple):
    """The last line that was written, and the first that is still kept."""

    number: int
    hash: str
    first: int


class Audit:
    """Appends lines to ``audit.jsonl``; goes on with a new file by size. One process writes."""

    def __init__(
        self,
        path: Path,
        rotate_bytes: int = ROTATE_BYTES,
        keeping: AuditRetention | None = None,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.path = path
        self.lost = 0  # lines that could not be written (full disk)
        self.told: list[Callable[[bytes], None]] = []  # whoever gets every line
        self._rotate_bytes, self._keeping, self._now_ns = (
            rotate_bytes,
            keeping or AuditRetention(),
            now_ns,
        )
        self._counted: dict[tuple[str, ...], AuditEntry] = {}
        self._unknown = RateLimit(UNKNOWN_PER_SECOND, UNKNOWN_BURST)
        self._unsaid = 0  # of those lost
        self._large = False  # it was said that it takes more than it should
        self._file, self._size = -1, 0
        self._anchor = os.open(path.with_name(ANCHOR), os.O_RDWR | os.O_CREAT, 0o600)
        known = read_anchor(path.with_name(ANCHOR))
        self.head = known or AuditHead(0, START, 1)
        self._open()
        self._go_on(known)

    def write(
        self,
        action: str,
        status: int,
        *,
        token: str = "",
        name: str = "",
        role: str = "",
        client: str = "",
        detail: str = "",
        kind: str = "",
    ) -> None:
        """Adds a line. A full disk loses lines, which are counted, but stops nobody's job.

        Refusals of one ``kind`` ("": the action itself) and caller are written once a minute.
        """
        now = self._now_ns()
        self.flush(now)
        if status >= 400 and not token and self._unknown.take("", now / 1e9):
            client, kind = "(many)", "(many)"
        entry = AuditEntry(
            number=0,
            before="",
            time_ns=now,
            action=_cut(action, "action"),
            status=status,
            token=_cut(token, "token"),
            name=_cut(name, "name"),
            role=_cut(role, "role"),
            client=_cut(client, "client"),
            detail=_cut(detail, "detail"),
        )
        if status < 400:
            self._append(entry)
            return
        key = (entry.token or entry.client, kind or entry.action, str(status))
        counted = self._counted.get(key)
        if counted is None:
            self._append(entry)
            if len(self._counted) >= MOST_COUNTED:
                self.flush(now, everything=True)
            self._counted[key] = structs.replace(entry, count=0, since_ns=now)
        else:
            self._counted[key] = structs.replace(counted, count=counted.count + 1, time_ns=now)

    def flush(self, now_ns: int = 0, *, everything: bool = False) -> None:
        """Writes the counts whose minute is over."""
        now_ns = now_ns or self._now_ns()
        while self._counted:
            key, entry = next(iter(self._counted.items()))  # the oldest is the first
            if not everything and now_ns - entry.since_ns < COUNT_SECONDS * 1e9:
                return
            del self._counted[key]
            if entry.count:
                self._append(entry)

    def expire(self) -> int:
        """Removes files that are too old, or the oldest of too many; how many."""
        now, keeping, gone = self._now_ns(), self._keeping, 0
        files = [(each, each.stat()) for each in older_files(self.path)]
        size = self._size + sum(status.st_size for _, status in files)
        for file, status in files:
            days = (now - status.st_mtime_ns) / DAY_NS
            old = keeping.days and days > keeping.days
            if not old and not (size > keeping.most_bytes and days > keeping.least_days):
                break
            file.unlink()
            size -= status.st_size
            gone += 1
            self._anchor_at(self.head._replace(first=last_number(file) + 1))
        if size > keeping.most_bytes and not self._large:
            logger.warning("the audit log has %d bytes, and nothing old enough to go", size)
        self._large = size > keeping.most_bytes
        return gone

    def close(self) -> None:
        """Write what was counted, and close the files."""
        self.flush(everything=True)
        os.close(self._file)
        os.close(self._anchor)

    def _append(self, entry: AuditEntry) -> None:
        if self._unsaid:
            count, self._unsaid = self._unsaid, 0
            detail = f"{count} lines before this one could not be written"
            lost = AuditEntry(
                number=0, before="", time_ns=self._now_ns(), action="audit", status=0, detail=detail
            )
            self._line(lost)
        self._line(entry)

    def _line(self, entry: AuditEntry) -> None:
        head = self.head
        entry = structs.replace(entry, number=head.number + 1, before=head.hash)
        encoded = msgspec.json.encode(entry) + b"\n"
        try:
            if self._size and self._size + len(encoded) > self._rotate_bytes:
                self._rotate()
            written = os.write(self._file, encoded)
            if written < len(encoded):
                os.ftruncate(self._file, self._size)
                raise OSError("the disk took only part of a line")
        except OSError:
            self.lost += 1
            self._unsaid += 1
            return
        self._size += written
        self._anchor_at(AuditHead(entry.number, hash_of(encoded), head.first))
        for told in self.told:
            told(encoded)

    def _anchor_at(self, head: AuditHead) -> None:
        self.head = head
        with suppress(OSError):
            os.pwrite(
                self._anchor, f"{head.number:020d} {head.hash} {head.first:020d}\n".encode(), 0
            )

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self._file = os.open(self.path, flags, 0o600)
        self._size = os.fstat(self._file).st_size

    def _rotate(self) -> None:
        os.close(self._file)
        self.path.rename(self.path.with_name(f"audit-{self.head.number:020d}.jsonl"))
        self._open()
        self.expire()

    def _go_on(self, last_known: AuditHead | None) -> None:
        """Behind the last line that is there; what is missing since is said, once."""
        last, torn = _last_line(self._file, self._size)
        if torn:  # a power cut in the middle of a line
            self._size -= torn
            os.ftruncate(self._file, self._size)
        head = _numbered(last)
        if head is not None and (last_known is None or head[0] >= last_known.number):
            self.head = AuditHead(*head, last_known.first if last_known else 1)
        elif last and last_known is None:  # a file of before there were chains
            self.path.rename(self.path.with_name("audit-before-chain.jsonl"))
            os.close(self._file)
            self._open()
        there = head[0] if head is not None else 0
        if (
            last_known is not None
            and there < last_known.number
            and not self._rotated(last_known.number)
        ):
            text = f"lines {there + 1} to {last_known.number} are missing from the audit log"
            logger.error("%s", text)
            self.write("audit", 0, detail=text)

    def _rotated(self, number: int) -> bool:
        """Whether the file with the last line was put away just before the server ended."""
        files = older_files(self.path)
        return bool(files) and last_number(files[-1]) == number


def hash_of(line: bytes) -> str:
    """What the next line carries of a line."""
    return hashlib.sha256(line.rstrip(b"\n")).hexdigest()


def older_files(path: Path) -> list[Path]:
    """Files that were put away, oldest first."""
    return sorted(path.parent.glob("audit-" + "[0-9]" * 20 + ".jsonl"))


def last_number(file: Path) -> int:
    """The number of the last line in a file that was put away."""
    return int(file.name.removeprefix("audit-").removesuffix(".jsonl"))


def read_anchor(path: Path) -> AuditHead | None:
    """What the anchor says; None: there is none."""
    try:
        number, digest, first = path.read_text().split()
        return AuditHead(int(number), digest, int(first))
    except (OSError, ValueError):
        return None


def _cut(text: str, field: str) -> str:
    """A text of bounded length; what is left out is counted."""
    if not text:
        return text
    most = BOUNDS[field]
    text = text.encode(errors="replace").decode()
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def _numbered(line: bytes) -> tuple[int, str] | None:
    try:
        entry = msgspec.json.decode(line, type=AuditEntry)
    except msgspec.MsgspecError:
        return None
    return entry.number, hash_of(line)


def _last_line(file: int, size: int) -> tuple[bytes, int]:
    """The last whole line of a file, and how many bytes of one that is not whole follow it."""
    start = max(0, size - (1 << 20))
    data = os.pread(file, size - start, start)
    whole = data.rfind(b"\n") + 1
    lines = data[:whole].rstrip(b"\n").rsplit(b"\n", 1)
    return lines[-1], len(data) - whole
