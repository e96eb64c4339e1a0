"""Waiting in tests for what another process does, and finding that process."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def eventually(condition: Callable[[], bool], seconds: float = 90.0) -> bool:
    """Whether a condition comes true in time: keepers yield to whatever else a machine does."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def keepers_below(folder: str) -> list[psutil.Process]:
    """Keepers whose socket is somewhere below a folder."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
        and any(word.startswith(folder) for word in process.info["cmdline"] or [])
    ]


def newest_child() -> psutil.Process:
    """What this process started last: keepers of earlier tests may not have been reaped yet."""
    return max(psutil.Process().children(), key=psutil.Process.create_time)
