"""Control groups of programs: whatever a program started ends with it, at one stroke.

Used where the kernel has version 2 and lets us make groups below our own (as root, or where systemd
delegates). Elsewhere the zygote finds what is left as a sub-reaper: ``process_tree``.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from phalanx.control.agent.spawn.containment import bound_group, enable_controllers
from phalanx.control.wire.zygote_messages import Containment

MOUNTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
KILL = "cgroup.kill"  # since Linux 5.14; older ones are left to the sub-reaper


class Cgroups:
    """One group a program, below one of the zygote's, which is named by its socket.

    What is left there of an earlier zygote of that name is ended: that one was killed.
    """

    def __init__(self, name: str) -> None:
        own = own_group()
        self._name = f"phalanx-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        self._folder = own / self._name if own is not None else None
        self._groups: dict[str, Path] = {}  # by key, of programs that run
        self._ending: list[Path] = []  # killed, and not empty yet
        self._folders: set[Path] = set()  # that groups were made in
        if self._folder is not None:
            self._end_left(self._folder)

    def make(self, key: str, bounds: Containment | None = None) -> Path | None:
        """A group for a program that is about to start; None: there are none here."""
        folder = self._folder
        if bounds is not None and bounds.group:
            folder = self._bounded(Path(bounds.group))
        if folder is None:
            return None
        group = folder / key
        try:
            group.mkdir(parents=True, exist_ok=True)
            if bounds is not None:
                bound_group(group.parent, bounds)
        except OSError as error:
            if bounds is not None and bounds.group:
                problem = f"no bounds for a job below {bounds.group}: {error.strerror}"
                raise OSError(error.errno, problem) from error
            self._folder = None
            return None
        self._folders.add(folder)
        if not (group / KILL).exists():
            return None
        self._groups[key] = group
        return group

    def _bounded(self, base: Path) -> Path:
        """The folder of our groups below one that the site has made for jobs."""
        folder = base / self._name
        if folder not in self._folders:
            self._end_left(folder)
        enable_controllers(base)
        folder.mkdir(exist_ok=True)
        enable_controllers(folder)
        return folder

    def end(self, key: str) -> None:
        """The program is gone: whatever it left is killed."""
        if (group := self._groups.pop(key, None)) is not None:
            self._end(group)

    def sweep(self) -> None:
        """Remove groups that have become empty."""
        self._ending = [group for group in self._ending if not _removed(group)]

    def close(self) -> None:
        """Everybody is gone."""
        self.sweep()
        for folder in self._folders:
            with suppress(OSError):
                folder.rmdir()

    def _end_left(self, folder: Path) -> None:
        """What an earlier zygote of this name left."""
        if folder.is_dir():
            for job in [path for path in folder.iterdir() if path.is_dir()]:
                for group in [path for path in job.iterdir() if path.is_dir()]:
                    self._end(group)
                self._end(job)

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
        pass
    except OSError:
        return False
    with suppress(OSError):
        group.parent.rmdir()  # its job's, with the last of its programs
    return True
