"""Who a process is, so that others can tell later whether it still lives."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

PROC = Path("/proc")


class ProcessIdentity(Struct, frozen=True):
    """A process among all that ever were: numbers are used again, start times are not."""

    host: str
    pid: int
    machine: str = ""  # /etc/machine-id
    boot: str = ""  # of its machine
    namespace: str = ""  # that its number belongs to
    started_ticks: int = 0  # after the boot

    def lives(self) -> bool | None:
        """Whether it does; None: it cannot be told from here (another machine or container)."""
        here = own_process()
        if not self.boot or not here.boot:
            return None
        if self.boot != here.boot:
            rebooted = (self.host, self.machine) == (here.host, here.machine) and self.machine
            return False if rebooted else None
        if self.namespace != here.namespace:
            return None
        return started_ticks(self.pid) == self.started_ticks


def own_process() -> ProcessIdentity:
    """This one."""
    return ProcessIdentity(
        host=socket.gethostname(),
        pid=os.getpid(),
        machine=_text(Path("/etc/machine-id")),
        boot=_text(PROC / "sys/kernel/random/boot_id"),
        namespace=_link(PROC / "self/ns/pid"),
        started_ticks=started_ticks(os.getpid()),
    )


def started_ticks(pid: int) -> int:
    """When a process was started, in ticks since the boot; 0: there is none, or it has ended."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def _link(path: Path) -> str:
    with suppress(OSError):
        return str(path.readlink())
    return ""
