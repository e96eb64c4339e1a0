"""The loads of a burn-in: each works without end and says, again and again, how fast it was.

At every look it also compares what came back with what must come back: a device that computes,
keeps or sends wrong bits under heat is worse than a slow one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from phalanx.doctor.acceptance.report import AcceptanceRequest, LoadKind
from phalanx.doctor.collective import GLOO_BYTES, GLOO_RANKS, NCCL_BYTES
from phalanx.doctor.gemm import operands
from phalanx.doctor.memory import CUDA_BYTES, HOST_BYTES
from phalanx.doctor.storage import round_trip

if TYPE_CHECKING:
    import torch

DISK_BYTES = 64 << 20
DISK_ROUND_SECONDS = 1.0  # a drive's life is counted in bytes written: one round in so long
RENDEZVOUS_SECONDS = 120.0


class LoadOrder(Struct, frozen=True, kw_only=True):
    """One process: what it works on."""

    load: LoadKind
    device: str
    threads: int = 1
    rank: int = 0  # of a collective; only the first one tells
    ranks: int = 1

    @property
    def tells(self) -> bool:
        """Whether its figures are the load's."""
        return self.rank == 0


class LoadSample(Struct, frozen=True):
    """What a load says: a rate since the last time, or why it can go on no more."""

    rate: float
    wrong: int = 0
    problem: str = ""


def plan_loads(request: AcceptanceRequest, gpus: int, cpus: int) -> list[LoadOrder]:
    """One process each: products and copies on every GPU, or else on the processor's cores."""
    cuda = [f"cuda:{index}" for index in range(gpus)]
    orders: list[LoadOrder] = []
    if "memory" in request.loads:
        orders += [LoadOrder(load="memory", device=device) for device in ("cpu", *cuda)]
    if "collective" in request.loads:
        ranks, backend = (gpus, "nccl") if gpus > 1 else (GLOO_RANKS, "gloo")
        name = f"{ranks} x {backend}"
        orders += [
            LoadOrder(load="collective", device=name, rank=rank, ranks=ranks)
            for rank in range(ranks)
        ]
    if "disk" in request.loads:
        orders.append(LoadOrder(load="disk", device="disk"))
    if "gemm" in request.loads:
        threads = 1 if cuda else max(1, cpus - len(orders))  # the cores that the others leave
        orders += [
            LoadOrder(load="gemm", device=device, threads=threads) for device in cuda or ("cpu",)
        ]
    return orders


def samples_of(order: LoadOrder, folder: Path, store: Path, interval: float) -> Iterator[float]:
    """Rates without end, one an interval; negative: what came back was wrong."""
    if order.load == "gemm":
        return _gemm(order, interval)
    if order.load == "memory":
        return _memory(order.device, interval)
    if order.load == "collective":
        return _collective(order, store, interval)
    return _disk(folder, interval)


def _repeat(
    work: Callable[[], object],
    finish: Callable[[], None],
    right: Callable[[], bool],
    amount: float,
    interval: float,
) -> Iterator[float]:
    """Rates of work that moves ``amount`` a call; looking at what came back is not counted."""
    work()
    finish()
    while True:
        began, calls, spent = time.perf_counter(), 0, 0.0
        while spent < interval:
            work()
            finish()
            calls += 1
            spent = time.perf_counter() - began
        rate = amount * calls / spent
        yield rate if right() else -rate


def _finisher(device: str) -> Callable[[], None]:
    import torch

    if not device.startswith("cuda"):
        return lambda: None
    return lambda: torch.cuda.synchronize(device)


def _gemm(order: LoadOrder, interval: float) -> Iterator[float]:
    import torch

    torch.set_num_threads(order.threads)
    cuda = order.device.startswith("cuda")
    left, right = operands(order.device, torch.bfloat16 if cuda else torch.float32)
    out = torch.empty_like(left)
    first = torch.mm(left, right, out=out).clone()
    batch = 8 if cuda else 1

    def multiply() -> None:
        for _ in range(batch):
            torch.mm(left, right, out=out)

    amount = batch * 2.0 * left.shape[0] ** 3
    return _repeat(
        multiply, _finisher(order.device), lambda: torch.equal(out, first), amount, interval
    )


def _memory(device: str, interval: float) -> Iterator[float]:
    import torch

    size = CUDA_BYTES if device.startswith("cuda") else HOST_BYTES
    there = torch.arange(size // 8, dtype=torch.int64, device=device)
    back = torch.empty_like(there)

    def copy() -> None:
        back.copy_(there)

    return _repeat(copy, _finisher(device), lambda: torch.equal(back, there), 2.0 * size, interval)


def _collective(order: LoadOrder, store: Path, interval: float) -> Iterator[float]:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    nccl = order.device.endswith("nccl")
    device = f"cuda:{order.rank}" if nccl else "cpu"
    if nccl:
        torch.cuda.set_device(order.rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if nccl else "gloo",
        store=FileStore(str(store), order.ranks),
        rank=order.rank,
        world_size=order.ranks,
        timeout=timedelta(seconds=RENDEZVOUS_SECONDS),
    )
    size = NCCL_BYTES if nccl else GLOO_BYTES
    buffer: torch.Tensor = torch.empty(size // 4, device=device)
    total = order.ranks * (order.ranks + 1) // 2

    def reduce() -> None:
        buffer.fill_(order.rank + 1)
        dist.all_reduce(buffer)

    def right() -> bool:
        return bool((buffer == total).all())

    # What each link carries, as nccl-tests counts it.
    amount = size * 2.0 * (order.ranks - 1) / order.ranks
    return _repeat(reduce, _finisher(device), right, amount, interval)


def _disk(folder: Path, interval: float) -> Iterator[float]:
    while True:
        began = time.perf_counter()
        measured, same = round_trip(folder, DISK_BYTES)
        rate = float(measured["write_mb_per_second"]) * 1e6
        yield rate if same else -rate
        rest = max(interval, DISK_ROUND_SECONDS) - (time.perf_counter() - began)
        time.sleep(max(0.0, rest))
