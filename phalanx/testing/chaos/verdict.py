"""What came of it: the same numbers or not, and whether anything stayed behind."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.control.backends.local import open_files
from phalanx.testing.local_processes import parent_of

GONE_SECONDS = 30.0  # for processes that were ended to be gone, on a busy machine


def compare(one: Path, other: Path) -> list[str]:
    """What differs between two runs: losses, bit for bit, and the bytes of the last checkpoint."""
    from phalanx.checkpoint import latest

    curves = [losses(folder) for folder in (one, other)]
    differences = [
        f"loss of step {step}: {curves[0].get(step)} and {loss}"
        for step, loss in curves[1].items()
        if curves[0].get(step) != loss
    ]
    states = [latest(folder / "checkpoints") for folder in (one, other)]
    if None in states:
        return [*differences, "a run left no checkpoint"]
    first, second = (weights(path) for path in states if path is not None)
    import torch

    return differences + [
        name for name, value in first.items() if not torch.equal(value, second[name])
    ]


def losses(folder: Path) -> dict[int, float | None]:
    """The loss of every step; of one that was made again, the last."""
    from phalanx.train import StepRecord, read_records

    records = read_records(folder / "metrics" / "steps.jsonl", StepRecord)
    return {record.step: record.loss for record in records}


def weights(path: Path) -> dict[str, Any]:
    """All tensors of a checkpoint."""
    import torch

    from phalanx.checkpoint import Checkpointer, stored_tensors

    state = {name: torch.empty(s, dtype=d) for name, (s, d) in stored_tensors(path).items()}
    Checkpointer(path.parent).load(path, state)
    return state


def belonging(root: Path) -> dict[int, str]:
    """Processes that name a folder in their command line, or have something open there.

    Not this one, and nobody who started it: they may have been told the folder.
    """
    needle, processes, own = str(root).encode(), {}, _ancestors()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) in own:
            continue
        with suppress(OSError):
            command = (process / "cmdline").read_bytes()
            files = (os.fsencode(path) for path in open_files(int(process.name)))
            if needle in command or any(path.startswith(needle) for path in files):
                words = command.replace(b"\0", b" ").decode(errors="replace").strip()
                processes[int(process.name)] = words[:200]
    return processes


def _ancestors() -> set[int]:
    ancestors, pid = set(), os.getpid()
    while pid > 0 and pid not in ancestors:
        ancestors.add(pid)
        pid = parent_of(pid) or 0
    return ancestors


def open_names(pid: int, folder: Path) -> list[str]:
    """What a process has open below a folder: tells a keeper from a worker."""
    names = []
    for path in open_files(pid):
        with suppress(ValueError):
            names.append(str(path.relative_to(folder)))
    return sorted(set(names))


def orphans(root: Path) -> list[str]:
    """Processes that stay although everything was ended."""
    deadline = time.monotonic() + GONE_SECONDS
    while (found := belonging(root)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [f"process {pid}: {command}" for pid, command in found.items()]


def shared_memory(folder: Path = Path("/dev/shm")) -> set[str]:
    """Names in shared memory: ours have none, so a new one was leaked by somebody."""
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def leaked_memory(
    before: set[str], folder: Path = Path("/dev/shm"), *, wait_seconds: float = GONE_SECONDS
) -> list[str]:
    """New names in shared memory that no process has open, and that nobody clears away.

    Those of others are theirs; when one of theirs is killed its names stay for a moment, until
    its resource tracker removes them."""
    deadline = time.monotonic() + wait_seconds
    while (found := _unheld(before, folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return sorted(str(folder / name) for name in found)


def _unheld(before: set[str], folder: Path) -> set[str]:
    new = shared_memory(folder) - before
    held = _held(folder) if new else set()
    return {name for name in new if str(folder / name) not in held}


def _held(folder: Path) -> set[str]:
    """What processes have open or mapped below a folder."""
    names: set[str] = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            names |= {str(path) for path in open_files(int(process.name))}
            with suppress(OSError):
                lines = (process / "maps").read_text().splitlines()
                names |= {line.split(maxsplit=5)[-1] for line in lines if str(folder) in line}
    return names


def listening(pids: dict[int, str]) -> dict[int, int]:
    """Ports that some processes listen on, and the sockets' numbers."""
    wanted = set()
    for pid in pids:
        for path in open_files(pid):
            if str(path).startswith("socket:["):
                wanted.add(int(str(path)[8:-1]))
    return {port: inode for port, inode in _listeners().items() if inode in wanted}


def _listeners() -> dict[int, int]:
    listeners = {}
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":  # LISTEN
                    listeners[int(fields[1].rpartition(":")[2], 16)] = int(fields[9])
    return listeners


def leaked_ports(seen: dict[int, int]) -> list[str]:
    """Ports of ours that are still listened on, by the very same sockets."""
    now = _listeners()
    return [f"port {port}" for port, inode in seen.items() if now.get(port) == inode]
