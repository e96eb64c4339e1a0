"""The rank processes of one machine: they end together, and the one that failed first is named."""

from __future__ import annotations

import ctypes
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import msgspec

from phalanx.checkpoint import latest
from phalanx.train.exits import EndReason, ExitCode, ExitInfo, now
from phalanx.train.rank.diagnose import killed
from phalanx.train.rank.stop import stop_signals
from phalanx.train.report.records import Record, decode
from phalanx.train.report.run_folder import RunFolder

GRACE_SECONDS = 2.0  # for the other ranks to say what they saw, once one has failed
LOG_TAIL_BYTES = 8192

log = logging.getLogger(__name__)


class RankExit(NamedTuple):
    """How a rank's process ended: an exit code, or a signal (negative)."""

    rank: int
    status: int


class ForkedRanks:
    """Watches forked ranks; one failure ends them all within seconds."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._running: dict[int, int] = {}  # pid: rank
        self._exits: list[RankExit] = []  # by the ranks' own doing, in the order seen
        self._deadline: float | None = None
        self._interrupts = 0
        self._kills_before = oom_kills()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._previous: dict[int, Any] = {}  # handlers to put back

    def add(self, rank: int, pid: int) -> None:
        """Take a forked rank into the gang."""
        self._running[pid] = rank

    def forward_signals(self) -> None:
        """From now on the signals that stop a run go to every rank."""
        for end in (self._wake_reader, self._wake_writer):
            end.setblocking(False)
        # A signal, also that of a rank's end, wakes the selector in ``watch``.
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        handlers = dict.fromkeys(stop_signals(), self._on_signal)
        handlers[signal.SIGCHLD] = lambda number, frame: None
        self._previous = {number: signal.signal(number, on) for number, on in handlers.items()}

    def watch(self, reports: int, show: Callable[[Record], None]) -> None:
        """Show what rank 0 reports until every rank has ended."""
        lines = _Lines(reports)
        with selectors.DefaultSelector() as selector:
            selector.register(reports, selectors.EVENT_READ)
            selector.register(self._wake_reader, selectors.EVENT_READ)
            while self._reap():
                for key, _ in selector.select(self._patience()):
                    if key.fileobj is self._wake_reader:
                        self._wake_reader.recv(4096)
                        continue
                    for line in lines.read():
                        show(decode(line))
                    if lines.ended:
                        selector.unregister(reports)
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    self._send(signal.SIGKILL)
        for line in lines.read():
            show(decode(line))
        self._close(reports)

    def _close(self, reports: int) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(reports)
        self._wake_reader.close()
        self._wake_writer.close()

    def verdict(self) -> ExitInfo:
        """How the run ended; also what ``exit_info.json`` says afterwards."""
        self._folder.clear_drafts()
        if self._interrupts > 1:
            message = "interrupted twice: ended without saving"
            return self._keep(ExitInfo(code=ExitCode.INTERRUPTED, reason="SIGINT", message=message))
        failed = [seen for seen in self._exits if seen.status != 0]
        # A rank that merely lost a peer may be seen before the peer; it is not the cause.
        failed.sort(key=lambda seen: seen.status == ExitCode.LOST_PEER)
        reported = self._folder.read_exit()
        if reported is not None and reported.early:
            return reported  # ranks that were further on may have failed when the first one left
        if not failed:
            message = "all ranks ended well, but none could write its report: is the disk full?"
            done = ExitInfo(code=ExitCode.DONE, reason=EndReason.NO_REPORT, message=message)
            return reported or self._keep(done)
        rank, status = failed[0]
        if status < 0:
            tail = _tail(self._folder.log(rank))
            name = signal.Signals(-status).name
            return self._keep(killed(rank, name, tail, self._memory_evidence()))
        if reported is not None and reported.code != ExitCode.DONE:
            return reported
        message = (
            f"ended with {_meaning(status)}, and no report could be written: is the disk full?"
        )
        advice = "The lines above, and the rank's log as far as it was written, say more."
        return self._keep(
            ExitInfo(
                code=status, reason=EndReason.NO_REPORT, message=message, advice=advice, rank=rank
            )
        )

    def _keep(self, info: ExitInfo) -> ExitInfo:
        newest = latest(self._folder.checkpoints)
        info = msgspec.structs.replace(info, checkpoint=str(newest or ""), finished=now())
        try:
            return self._folder.write_exit(info)
        except OSError as error:
            log.warning("cannot write %s: %s", self._folder.exit_info, error)
            return info

    def _reap(self) -> bool:
        """Collect the ranks that have ended; whether any still runs."""
        for pid, rank in list(self._running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del self._running[pid]
            code = os.waitstatus_to_exitcode(status)
            ended_by_us = code == -signal.SIGKILL and self._ending
            if not ended_by_us:
                self._exits.append(RankExit(rank, code))
            if code != 0 and self._deadline is None:
                self._deadline = time.monotonic() + GRACE_SECONDS
            elif self._left_early() and self._deadline is None:
                self._deadline = time.monotonic() + GRACE_SECONDS
                self._send(signal.SIGTERM)  # perhaps only the one rank was asked to stop
        return bool(self._running)

    def _left_early(self) -> bool:
        report = self._folder.read_exit()
        return report is not None and report.early

    @property
    def _ending(self) -> bool:
        overdue = self._deadline is not None and time.monotonic() >= self._deadline
        return overdue or self._interrupts > 1

    def _patience(self) -> float | None:
        if self._deadline is None:
            return None
        return max(self._deadline - time.monotonic(), 0.05)

    def _send(self, number: int) -> None:
        for pid in self._running:
            with suppress(ProcessLookupError):  # it was collected a moment ago
                os.kill(pid, number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        self._send(signal.SIGKILL if self._interrupts > 1 else number)

    def _memory_evidence(self) -> str:
        kills = oom_kills()
        new = [name for name, count in kills.items() if count > self._kills_before.get(name, 0)]
        return f"oom_kill rose in {', '.join(new)}; {memory_left()}" if new else ""


def _meaning(status: int) -> str:
    """An exit code of a rank in words."""
    named = {code.value: code.name.lower().replace("_", " ") for code in ExitCode}
    return f"exit code {status} ({named.get(status, 'unknown')})"


class _Lines:
    """Whole lines out of a pipe that is read as it fills."""

    def __init__(self, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self._pipe = pipe
        self._rest = b""
        self.ended = False

    def read(self) -> list[bytes]:
        chunk = b""
        try:
            while piece := os.read(self._pipe, 1 << 16):
                chunk += piece
            self.ended = True
        except BlockingIOError:
            pass
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return lines


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the launcher dies, however it dies."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(ExitCode.OTHER)


def oom_kills(
    memory_folder: Path = Path("/sys/fs/cgroup"), vmstat: Path = Path("/proc/vmstat")
) -> dict[str, int]:
    """How often the kernel has killed for lack of memory, in this control group and at all."""
    places = (
        memory_folder / "memory.events",
        memory_folder / "memory" / "memory.oom_control",
        vmstat,
    )
    kills: dict[str, int] = {}
    for place in places:
        try:
            pairs = (line.split() for line in place.read_text().splitlines())
            kills |= {str(place): int(pair[1]) for pair in pairs if pair[0] == "oom_kill"}
        except OSError:
            continue
    return kills


def memory_left() -> str:
    """What the kernel says is left, in words."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return "memory left unknown"
    wanted = [line for line in lines if line.startswith(("MemTotal", "MemAvailable"))]
    return ", ".join(" ".join(line.split()) for line in wanted)


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - LOG_TAIL_BYTES, 0))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
