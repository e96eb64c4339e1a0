"""Control groups of programs: whatever a program started ends with it, at one stroke.

Used where the kernel has version 2 and lets us make groups below our own (as root, or where systemd
delegates). Elsewhere the zygote finds what is left as a sub-reaper: ``process_tree``.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

MOUNTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
KILL = "cgroup.kill"  # since Linux 5.14; older ones are left to the sub-reaper


class Cgroups:
    """One group a program, below one of the zygote's, which is named by its socket.

    What is left there of an earlier zygote of that name is ended: that one was killed.
    """

    def __init__(self, name: str) -> None:
        own = own_group()
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        self._folder = own / f"phalanx-{digest}" if own is not None else None
        self._ending: list[Path] = []  # killed, and not empty yet
        if self._folder is not None and self._folder.is_dir():
            for group in [path for path in self._folder.iterdir() if path.is_dir()]:
                self._end(group)

    def make(self, key: str) -> Path | None:
        """A group for a program that is about to start; None: there are none here."""
        if self._folder is None:
            return None
        group = self._group(self._folder, key)
        try:
            group.mkdir(parents=True, exist_ok=True)
        except OSError:
            self._folder = None
            return None
        return group if (group / KILL).exists() else None

    def end(self, key: str) -> None:
        """The program is gone: whatever it left is killed."""
        if self._folder is not None and (group := self._group(self._folder, key)).is_dir():
            self._end(group)

    def sweep(self) -> None:
        """Remove groups that have become empty."""
        self._ending = [group for group in self._ending if not _removed(group)]

    def close(self) -> None:
        """Everybody is gone."""
        self.sweep()
        if self._folder is not None:
            _removed(self._folder)

    def _group(self, folder: Path, key: str) -> Path:
        return folder / key.replace("/", "-")

    def _end(self, group: Path) -> None:
        with suppress(OSError):
            (group / KILL).write_text("1")
        if not _removed(group):
            self._ending.append(group)


def enter_group(group: Path) -> None:
    """This process and its descendants belong to a group from now on, if the kernel lets them."""
    with suppress(OSError):
        (group / "cgroup.procs").write_text(str(os.getpid()))


def own_group() -> Path | None:
    """The folder of this process's own group of version 2; None: there is none."""
    with suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        path = next((line[3:] for line in lines if line.startswith("0::")), "")
        for mount in MOUNTS:
            if path and (mount / "cgroup.procs").exists():
                return mount / path.lstrip("/")
    return None


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
