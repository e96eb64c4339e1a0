"""Which process of a local cluster is what, so that it can be killed or looked at."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from phalanx.control.backends.local import LocalNode, all_processes, open_files, program_of
from phalanx.control.host.process_tree import read_stat


def worker_pids(node: LocalNode, job: int) -> dict[int, int]:
    """The worker processes of a job on a node, by their index there."""
    pids: dict[int, int] = {}
    python = Path("/proc/self/exe").readlink()
    for pid in all_processes():
        with suppress(OSError):
            # Our own trainer's were forked, and write their logs themselves. What they start may
            # write there too, as W&B's own process does.
            path = Path(f"/proc/{pid}/fd/1").readlink()
            ours = path.parent == node.state / "jobs" / str(job) and path.stem.startswith("worker-")
            if ours and Path(f"/proc/{pid}/exe").readlink() == python:
                pids[int(path.stem.removeprefix("worker-"))] = pid
    programs = {pid: of for pid in all_processes() if (of := program_of(pid, node)) is not None}
    for pid, (number, index) in programs.items():
        stat = read_stat(pid)
        if number == job and stat is not None and stat.state != "Z" and stat.parent not in programs:
            pids.setdefault(index, pid)
    return pids


def keeper_pid(node: LocalNode, job: int) -> int | None:
    """The keeper of a job on a node."""
    log_file = node.state / "jobs" / str(job) / "keeper.log"
    return next((pid for pid in all_processes() if log_file in open_files(pid)), None)


def zygote_pid(node: LocalNode) -> int | None:
    """The process that all others of a node but its agent are forked from."""
    found = _zygotes(node)
    return next((pid for pid, parent in found.items() if parent not in found), None)


def store_pid(node: LocalNode) -> int | None:
    """The process where the ranks of a gang meet, if this node hosts it."""
    return next(iter(_stores(node)), None)


def program_store_pid(node: LocalNode) -> int | None:
    """The newest store that this node hosts for a program's ranks alone."""
    return next(reversed(_stores(node)[1:]), None)


def _stores(node: LocalNode) -> list[int]:
    """The node's own first."""
    found = _zygotes(node)
    return sorted(pid for pid, parent in found.items() if parent in found)


def _zygotes(node: LocalNode) -> dict[int, int]:
    """A node's zygote and its store, which has no log of its own; and the parent of each."""
    log_file = node.state / "zygote.log"
    pids = [pid for pid in all_processes() if log_file in open_files(pid)]
    return {pid: parent for pid in pids if (parent := parent_of(pid)) is not None}


def parent_of(pid: int) -> int | None:
    """The parent of a process; None of one that is gone."""
    stat = read_stat(pid)
    return None if stat is None else stat.parent
