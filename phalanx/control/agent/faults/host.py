"""Memory that ran out, mounts that hang, and notices that the site takes the node away."""

from __future__ import annotations

import re
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx.cluster.causes import CAUSES, Cause
from phalanx.cluster.protocol.messages import THIS_NODE, DeviceError, NodeNotice
from phalanx.doctor.storage import network_mounts, probe_all, read_table

COMMAND_SECONDS = 10.0
NOTICE_BYTES = 64 << 10
DEFAULT_SECONDS = 120.0  # what spot markets usually give


def oom_kills(root: Path = Path("/sys/fs/cgroup"), own: str = "") -> int:
    """Processes of our control group that were killed for memory; 0 where nobody says."""
    places = [
        root / own.lstrip("/") / "memory.events",
        root / "memory.events",
        root / "memory" / own.lstrip("/") / "memory.oom_control",
        root / "memory" / "memory.oom_control",
    ]
    for path in places:
        with suppress(OSError):
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
            if found:
                return int(found[1])
    return 0


def own_group(table: Path = Path("/proc/self/cgroup")) -> str:
    """Our control group, of version 2 or of the memory controller."""
    with suppress(OSError):
        for line in table.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                return path
    return ""


class CgroupMonitor:
    """How many processes were killed for memory since the last look."""

    def __init__(self, root: Path) -> None:
        self._root, self._group = root, own_group()
        self._before = oom_kills(root, self._group)

    def kills(self) -> int:
        """Those that nobody has asked about yet."""
        now = oom_kills(self._root, self._group)
        found, self._before = max(0, now - self._before), now
        return found

    def look(self) -> list[DeviceError]:
        if kills := self.kills():
            detail = f"{kills} processes of the node's control group were killed"
            return [DeviceError(node=THIS_NODE, cause=Cause.HOST_OUT_OF_MEMORY, detail=detail)]
        return []


class MountMonitor:
    """Whether mounts answer; one that fails once may have a server that restarts."""

    def __init__(self, wanted: tuple[str, ...]) -> None:
        self._wanted = [Path(path) for path in wanted]
        self._failed: list[Path] = []

    def look(self) -> list[DeviceError]:
        problems = probe_all([*self._wanted, *network_mounts(read_table())])
        failed = [path for path, problem in problems.items() if problem]
        again, self._failed = [path for path in failed if path in self._failed], failed
        return [
            DeviceError(node=THIS_NODE, cause=Cause.FILESYSTEM_MOUNT, detail=f"{p}: {problems[p]}")
            for p in again
        ]


class _NoticeText(Struct, frozen=True, kw_only=True):
    """What a notice may say; everything else in it is ignored."""

    deadline_seconds: float | None = None
    time: str = ""  # RFC 3339, as spot markets write it
    NotBefore: str = ""
    cause: str = ""


def parse_notice(text: str, now_ns: int) -> NodeNotice | None:
    """A notice: JSON with ``deadline_seconds`` or ``time``, a time, seconds, or any words."""
    text = text.strip()
    if not text or text.lower() in ("false", "none", "null", "[]", "{}"):
        return None
    notice = _NoticeText()
    with suppress(msgspec.MsgspecError):
        notice = msgspec.json.decode(text, type=_NoticeText)
    cause = notice.cause if notice.cause in CAUSES else Cause.HOST_MAINTENANCE
    seconds = DEFAULT_SECONDS
    if notice.deadline_seconds is not None:
        seconds = notice.deadline_seconds
    elif re.fullmatch(r"\d+(\.\d+)?", text):
        seconds = float(text)
    elif (at := _time(notice.time or notice.NotBefore or text)) is not None:
        return NodeNotice(node=THIS_NODE, deadline_ns=max(now_ns, at), cause=cause)
    deadline_ns = now_ns + int(max(0.0, seconds) * 1e9)
    return NodeNotice(node=THIS_NODE, deadline_ns=deadline_ns, cause=cause)


def _time(text: str) -> int | None:
    with suppress(ValueError):
        found = datetime.fromisoformat(text)
        if found.tzinfo is not None:
            return int(found.timestamp() * 1e9)
    return None


class NoticeSource(Struct, frozen=True, kw_only=True):
    """Where a site says it; nothing is asked unless it is named."""

    file: str = ""
    command: tuple[str, ...] = ()  # never through a shell; prints the notice
    url: str = ""  # answers 200 with the notice, or 404

    def look(self) -> list[NodeNotice]:
        """Whether there is a notice now."""
        for text in (self._from_file(), self._from_command(), self._from_url()):
            if (notice := parse_notice(text, time.time_ns())) is not None:
                return [notice]
        return []

    def _from_file(self) -> str:
        if self.file:
            with suppress(OSError):
                return Path(self.file).read_text(errors="replace")[:NOTICE_BYTES] or "now"
        return ""

    def _from_command(self) -> str:
        if self.command:
            with suppress(OSError, subprocess.SubprocessError):
                done = subprocess.run(
                    self.command,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=COMMAND_SECONDS,
                    check=True,
                )
                return done.stdout[:NOTICE_BYTES]
        return ""

    def _from_url(self) -> str:
        if self.url:
            with suppress(OSError, ValueError, urllib.error.URLError):
                opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
                with opener.open(self.url, timeout=COMMAND_SECONDS) as answer:
                    return str(answer.read(NOTICE_BYTES).decode(errors="replace"))
        return ""
