"""Collectives among all ranks, from 8 bytes on: seconds, algbw and busbw, as nccl-tests count."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from phalanx.config.errors import first_line
from phalanx.doctor.fabric.report import SweepRow

if TYPE_CHECKING:
    from phalanx.doctor.fabric.ranks import FabricRanks

LEAST_BYTES, GROWTH = 8, 8
FLOAT = 4  # bytes
ROUND_SECONDS = 0.2  # about, for the calls of one size
MOST_CALLS = 50
SIZE_SECONDS = 20.0  # a call that takes longer is the last of its collective


def sizes(most_bytes: int) -> list[int]:
    """The sizes of a sweep, the largest at most so large."""
    found = [LEAST_BYTES]
    while found[-1] * GROWTH <= most_bytes:
        found.append(found[-1] * GROWTH)
    return found


def bus_factor(collective: str, ranks: int) -> float:
    """What each link carries of a buffer, which does not depend on the number of ranks."""
    if collective == "broadcast":
        return 1.0
    return (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks


def sweep(group: FabricRanks, collectives: tuple[str, ...], most_bytes: int) -> Iterator[SweepRow]:
    """All sizes of all collectives; every rank has to run it, and has the same rows."""
    for name in collectives:
        for size in sizes(most_bytes):
            row = _row(group, name, size)
            yield row
            if row.problem or row.seconds > SIZE_SECONDS:
                break


def _row(group: FabricRanks, name: str, size: int) -> SweepRow:
    problem, seconds, real = "", 0.0, 0
    try:
        call, real = _prepared(group, name, size)
        seconds = _timed(group, call)
    except (RuntimeError, NotImplementedError) as error:
        problem = first_line(error)[:200]
    told = group.gather((problem, seconds))
    problem = next((each for each, _ in told if each), "")
    if problem:
        return SweepRow(collective=name, bytes=size, problem=problem)
    seconds = max(each for _, each in told)
    algbw = real / seconds
    return SweepRow(
        collective=name,
        bytes=real,
        seconds=seconds,
        algbw=algbw,
        busbw=algbw * bus_factor(name, group.world),
    )


def _prepared(group: FabricRanks, name: str, size: int) -> tuple[Callable[[], object], int]:
    """The call, and the bytes of its whole buffer, of which each rank has the same share."""
    import torch
    import torch.distributed as dist

    # Later releases of torch have other names for two of them.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    share = max(1, size // FLOAT // group.world)
    whole = torch.ones(share * group.world, device=group.device)
    part = torch.ones(share, device=group.device)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: all_gather(whole, part),
        "reduce_scatter": lambda: reduce_scatter(part, whole),
        "broadcast": lambda: dist.broadcast(whole, src=0),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
    }
    return calls[name], whole.numel() * FLOAT


def _timed(group: FabricRanks, call: Callable[[], object]) -> float:
    """Seconds of a call, the mean of as many as fit."""
    call()  # connections are made at the first one
    group.synchronize()
    group.barrier()
    began = time.perf_counter()
    call()
    group.synchronize()
    one = max(group.gather(time.perf_counter() - began))
    calls = max(1, min(MOST_CALLS, int(ROUND_SECONDS / max(one, 1e-9))))
    group.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    group.synchronize()
    return (time.perf_counter() - began) / calls
