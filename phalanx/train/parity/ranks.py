"""A group of ranks on this machine for a function, forked from a process that has torch already.

Starting a rank costs milliseconds instead of the seconds of a fresh interpreter. The parent must
have a single thread and no process group, which `OMP_NUM_THREADS=1` ensures.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

COLLECTIVE_SECONDS = 240.0  # that ranks wait for each other
GRACE_SECONDS = 30.0  # for a rank to notice by itself that another one is gone


class RankError(Exception):
    """A rank raised, died or did not finish; carries its traceback."""


def run_group(
    world_size: int,
    function: Callable[[], bytes],
    timeout_seconds: float = 270.0,
    *,
    device: str = "cpu",
) -> list[bytes]:
    """Call ``function`` on every rank of a group; what it returns, in order of ranks.

    With ``device`` "cuda" each rank has a GPU of its own, and the group NCCL.
    """
    with tempfile.TemporaryDirectory(prefix="phalanx-ranks-") as folder:
        results_folder = Path(folder)
        limit = timedelta(seconds=max(COLLECTIVE_SECONDS, timeout_seconds - GRACE_SECONDS))
        group = _Rendezvous(world_size, results_folder, limit, device)
        processes = [_fork(rank, group, function) for rank in range(world_size)]
        ends: dict[int, int] = {}
        try:
            ends = _wait(processes, timeout_seconds)
        finally:  # also when the caller's own time is up: no rank outlives it
            _kill([pid for pid in processes if pid not in ends])
        results = [
            _result(results_folder, rank, ends.get(pid)) for rank, pid in enumerate(processes)
        ]
    errors = [f"rank {rank}:\n{error}" for rank, (error, _) in enumerate(results) if error]
    if errors:
        raise RankError("\n".join(errors))
    return [value for _, value in results]


class _Rendezvous(NamedTuple):
    """What ranks need to meet."""

    world_size: int
    folder: Path
    limit: timedelta  # of a collective
    device: str

    def join(self, rank: int) -> None:
        if self.device == "cuda":
            torch.cuda.set_device(rank)
        store = FileStore(str(self.folder / "store"), self.world_size)
        dist.init_process_group(
            "gloo" if self.device == "cpu" else "cpu:gloo,cuda:nccl",
            store=store,
            rank=rank,
            world_size=self.world_size,
            timeout=self.limit,
        )


def _fork(rank: int, group: _Rendezvous, function: Callable[[], bytes]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    error, value = "", b""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(1)
        group.join(rank)
        value = function()
        dist.barrier()  # nobody leaves while a neighbour still talks
        dist.destroy_process_group()
    except BaseException:
        error = traceback.format_exc()
    try:
        part = group.folder / f"part.{rank}"
        part.write_bytes(error.encode() or value)
        part.rename(_answer(group.folder, rank, failed=bool(error)))
    finally:
        # Whatever happened: a child that returned from here would go on as its parent.
        os._exit(1 if error else 0)


def _answer(folder: Path, rank: int, *, failed: bool) -> Path:
    """The file with a rank's value, or with its traceback."""
    return folder / f"{'error' if failed else 'value'}-{rank}"


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


def _result(folder: Path, rank: int, code: int | None) -> tuple[str, bytes]:
    """What went wrong, and a rank's value. ``code``: negative for a signal; None: it ran on."""
    if (value := _answer(folder, rank, failed=False)).exists():
        return "", value.read_bytes()
    if (error := _answer(folder, rank, failed=True)).exists():
        return error.read_text() or "raised", b""
    if code is None:
        return "still ran when time was up, and was killed", b""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}", b""
    return f"ended with exit code {code} and no result", b""
