"""An all-reduce among ranks on this machine: gloo over loopback, NCCL where there are GPUs.

algbw is the size of the buffer over the time; busbw is what each link carries for it, which is
2(n-1)/n of that, and does not depend on the number of ranks.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from phalanx.cluster.causes import Cause
from phalanx.doctor.finding import Finding
from phalanx.doctor.memory import best

GLOO_BYTES, NCCL_BYTES = 8 << 20, 256 << 20
GLOO_RANKS = 2
LIMIT_SECONDS = 60.0
GLOO_WARN_BYTES_PER_SECOND = 0.1e9


class CollectiveOutcome(Struct):
    """What one rank tells."""

    seconds: float
    right: bool
    problem: str = ""


def check_collective(backend: Literal["gloo", "nccl"], ranks: int) -> Finding:
    """Start ranks, reduce a buffer with a known sum, and end them all."""
    size = GLOO_BYTES if backend == "gloo" else NCCL_BYTES
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="phalanx-doctor-") as folder:
        pids = [_fork(Path(folder), backend, rank, ranks, size) for rank in range(ranks)]
        _wait(pids, began + LIMIT_SECONDS)
        outcomes = [_read(Path(folder) / f"rank-{rank}") for rank in range(ranks)]
    return judge(backend, size, outcomes)


def judge(backend: str, size: int, outcomes: list[CollectiveOutcome]) -> Finding:
    """The verdict on what the ranks told."""
    ranks, name = len(outcomes), f"collective {backend}"
    problems = [outcome.problem for outcome in outcomes if outcome.problem]
    wrong = sum(not outcome.right for outcome in outcomes if not outcome.problem)
    if problems or wrong:
        return Finding(
            check=name,
            verdict="fail",
            measured={"ranks": ranks, "wrong_ranks": wrong, "problem": "; ".join(problems[:1])},
            expected="every rank has the right sum",
            suggestion="run it again with NCCL_DEBUG=INFO (or TORCH_CPP_LOG_LEVEL=INFO for gloo)",
            cause=Cause.SILENT_CORRUPTION if wrong else Cause.SYSTEM_SERVICE,
        )
    algbw = size / max(outcome.seconds for outcome in outcomes)
    busbw = algbw * 2 * (ranks - 1) / ranks
    slow = backend == "gloo" and busbw < GLOO_WARN_BYTES_PER_SECOND
    return Finding(
        check=name,
        verdict="warn" if slow else "pass",
        measured={
            "ranks": ranks,
            "mib": size >> 20,
            "algbw_gb_per_second": algbw / 1e9,
            "busbw_gb_per_second": busbw / 1e9,
        },
        expected="the right sum on every rank"
        + (f", busbw at least {GLOO_WARN_BYTES_PER_SECOND / 1e9} GB/s" if slow else ""),
        suggestion="see what else runs on these cores" if slow else "",
    )


def _fork(folder: Path, backend: str, rank: int, ranks: int, size: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        # What a rank prints about sockets is no part of the report.
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        try:
            outcome = _reduce(folder, backend, rank, ranks, size)
        except Exception as error:
            outcome = CollectiveOutcome(0.0, False, f"{type(error).__name__}: {str(error)[:300]}")
        draft = folder / f"rank-{rank}.new"
        draft.write_bytes(msgspec.json.encode(outcome))
        draft.rename(folder / f"rank-{rank}")
    finally:
        os._exit(0)


def _reduce(folder: Path, backend: str, rank: int, ranks: int, size: int) -> CollectiveOutcome:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backend,
        store=FileStore(str(folder / "store"), ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=LIMIT_SECONDS),
    )
    buffer = torch.empty(size // 4, device=device)

    def reduce() -> None:
        buffer.fill_(rank + 1)
        dist.all_reduce(buffer)
        if backend == "nccl":
            torch.cuda.synchronize()

    seconds = best(reduce, rounds=3)
    right = bool((buffer == ranks * (ranks + 1) // 2).all())
    dist.barrier()
    dist.destroy_process_group()
    return CollectiveOutcome(seconds, right)


def _wait(pids: list[int], deadline: float) -> None:
    while pids and time.monotonic() < deadline:
        for pid in list(pids):
            if os.waitpid(pid, os.WNOHANG)[0]:
                pids.remove(pid)
        time.sleep(0.005)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _read(path: Path) -> CollectiveOutcome:
    try:
        return msgspec.json.decode(path.read_bytes(), type=CollectiveOutcome)
    except OSError:
        return CollectiveOutcome(0.0, False, f"a rank did not end within {LIMIT_SECONDS:.0f} s")
