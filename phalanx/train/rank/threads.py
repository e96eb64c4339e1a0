"""A process that forks ranks has one thread: a fork copies the locks of the others, not them.

Imports neither torch nor numpy, since what it decides must be decided before they are loaded.
"""

from __future__ import annotations

import os
from pathlib import Path


class ThreadsError(RuntimeError):
    """Ranks were to be forked from a process with several threads."""

    def __init__(self, threads: int) -> None:
        super().__init__(
            f"this process has {threads} threads, and ranks can be forked only from one that has a "
            "single thread. Import phalanx.train.rank.launch before numpy and torch, end "
            "threads of your own first, or start the job in a process of its own: "
            "phalanx train JOB.toml"
        )


def keep_single_threaded() -> None:
    """Keep torch and numpy from making thread pools; call before they are imported.

    A rank sets its own number of threads (train.cpu_threads).
    """
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def require_single_thread() -> None:
    """Raise ``ThreadsError`` where a fork would be unsafe."""
    tasks = Path("/proc/self/task")
    threads = len(list(tasks.iterdir())) if tasks.exists() else 1
    if threads > 1:
        raise ThreadsError(threads)
