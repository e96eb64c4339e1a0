"""Who descends from a process, and what that cost: read from ``/proc``.

A process that calls ``setsid`` leaves its group and its session, but not its descent: where its
parent ends, it goes to the nearest ancestor that is a sub-reaper.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
PROC = Path("/proc")
_TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")


class ProcessStat(NamedTuple):
    """One line of ``/proc/PID/stat``."""

    parent: int
    state: str
    cpu_ns: int  # its own, and of children that it has waited for


def become_subreaper() -> None:
    """Orphans among the descendants of this process become its children; kept across ``exec``."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def read_stat(pid: int) -> ProcessStat | None:
    """What the kernel says of a process; None: it is gone."""
    try:
        words = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return ProcessStat(int(words[1]), words[0], sum(map(int, words[11:15])) * _TICK_NS)
    except (OSError, ValueError, IndexError):
        return None


def read_all() -> dict[int, ProcessStat]:
    """Every process of this machine that can be seen."""
    processes = {}
    for name in os.listdir(PROC):  # noqa: PTH208 - a path object for each is ten times slower
        if name.isdigit() and (stat := read_stat(int(name))) is not None:
            processes[int(name)] = stat
    return processes


def trees(roots: list[int], table: dict[int, ProcessStat]) -> dict[int, list[int]]:
    """By root: it, where it lives, and all that descends from it."""
    children: dict[int, list[int]] = {}
    for pid, stat in table.items():
        children.setdefault(stat.parent, []).append(pid)
    members = {}
    for root in roots:
        tree = [root] if root in table else []
        for pid in tree:
            tree.extend(children.get(pid, ()))
        members[root] = tree
    return members


def own_children() -> list[int]:
    """The children of this process, which has one thread."""
    with suppress(OSError):
        me = os.getpid()
        text = (PROC / str(me) / "task" / str(me) / "children").read_text()
        return [int(word) for word in text.split()]
    return [pid for pid, stat in read_all().items() if stat.parent == os.getpid()]
