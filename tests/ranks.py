"""Ranks for tests: forked from this process, which has imported torch already.

Starting a rank costs milliseconds instead of the seconds of a fresh interpreter. The parent
must have a single thread and no process group, which `OMP_NUM_THREADS=1` in conftest ensures.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore

GRACE_SECONDS = 30.0  # for a rank to notice by itself that another one is gone


class RankError(AssertionError):
    """A rank raised, died or did not finish; carries its traceback."""


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_seconds: float = 270.0
) -> list[Any]:
    """Call ``function(*args)`` on every rank of a gloo group; results in order of ranks."""
    with tempfile.TemporaryDirectory(prefix="phalanx-ranks-") as folder:
        processes = [
            _fork(rank, world_size, Path(folder), function, args) for rank in range(world_size)
        ]
        ends: dict[int, int] = {}
        try:
            ends = _wait(processes, timeout_seconds)
        finally:  # also when the test's own time is up: no rank outlives the test
            _kill([pid for pid in processes if pid not in ends])
        results = [
            _result(Path(folder) / f"result-{rank}", ends.get(pid))
            for rank, pid in enumerate(processes)
        ]
    errors = [f"rank {rank}:\n{error}" for rank, (error, _) in enumerate(results) if error]
    if errors:
        raise RankError("\n".join(errors))
    return [value for _, value in results]


def run_alone(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)`` in a child without a group, to keep its traces out of this process.

    A process group, even a pretended one, leaves threads or state behind that later forks inherit.
    """

    def call() -> Any:
        dist.destroy_process_group()
        value = function(*args)
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        return value

    return run_ranks(1, call)[0]


def die_together() -> None:
    """Every rank kills itself once all are here; no group of theirs notices before."""
    store = dist.distributed_c10d._get_default_store()
    store.add("dying", 1)
    while store.add("dying", 0) < dist.get_world_size():
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)


def _fork(
    rank: int, world_size: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    error, value = "", None
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(1)
        store = FileStore(str(folder / "store"), world_size)
        limit = timedelta(seconds=240)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=limit
        )
        value = function(*args)
        dist.barrier()  # nobody leaves while a neighbour still talks
        dist.destroy_process_group()
    except BaseException:
        error = traceback.format_exc()
    try:
        (folder / f"result-{rank}.part").write_bytes(pickle.dumps((error, value)))
        (folder / f"result-{rank}.part").rename(folder / f"result-{rank}")
    finally:
        # Whatever happened: a child that returned from here would go on running the tests.
        os._exit(1 if error else 0)


def _wait(processes: list[int], timeout_seconds: float) -> dict[int, int]:
    """Wait for all; after the first failure the others get a while. How each ended, by pid."""
    deadline = time.monotonic() + timeout_seconds
    ends: dict[int, int] = {}
    while len(ends) < len(processes) and time.monotonic() < deadline:
        for pid in processes:
            if pid in ends:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ends[pid] = os.waitstatus_to_exitcode(status)
                if status:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.005)
    return ends


def _kill(processes: list[int]) -> None:
    for pid in processes:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _result(path: Path, code: int | None) -> tuple[str, Any]:
    """A rank's result, or how it ended: its exit code, negative for a signal; None: it ran on."""
    if not path.exists():
        if code is None:
            return "still ran when time was up, and was killed", None
        if code < 0:
            return f"ended by {signal.Signals(-code).name}", None
        return f"ended with exit code {code} and no result", None
    found: tuple[str, Any] = pickle.loads(path.read_bytes())
    return found
