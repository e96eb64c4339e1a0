"""The ranks that measure: what they measure with, and what they tell each other beside it."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

LIMIT_SECONDS = 180.0  # that a rank waits for another one
PAIR_REPEATS, LATENCY_REPEATS = 3, 20
LATENCY_BYTES = 8


class FabricRanks:
    """All ranks, as torchrun's variables name them; NCCL where each of them has a GPU."""

    def __init__(self, ranks_per_node: int) -> None:
        import torch
        import torch.distributed as dist

        local = int(os.environ.get("LOCAL_RANK", 0))
        limit = timedelta(seconds=LIMIT_SECONDS)
        has_gpu = torch.cuda.device_count() > local
        dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo", timeout=limit)
        self._control = dist.new_group(backend="gloo", timeout=limit)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.nodes, self.per_node = self.world // ranks_per_node, ranks_per_node
        self.node, self.rail = divmod(self.rank, ranks_per_node)
        self.name = os.environ.get("PHALANX_NODE", f"node-{self.node}")
        self.gpus = all(self.gather(has_gpu))
        self.backend = "nccl" if self.gpus else "gloo"
        self.device = torch.device("cpu")
        if self.gpus:
            self.device = torch.device("cuda", local)
            torch.cuda.set_device(self.device)
            # Pairs may not be the first to use a communicator: all ranks have to.
            dist.all_reduce(torch.zeros(1, device=self.device))

    def gather(self, value: T) -> list[T]:
        """What every rank says, by rank."""
        import torch.distributed as dist

        told: list[T | None] = [None] * dist.get_world_size()
        dist.all_gather_object(told, value, group=self._control)
        return told  # type: ignore[return-value]

    def barrier(self) -> None:
        """Until all ranks are here."""
        import torch.distributed as dist

        dist.barrier(group=self._control)

    def synchronize(self) -> None:
        """Until the device has done what it was told."""
        import torch

        if self.gpus:
            torch.cuda.synchronize()

    def buffers(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What is sent and what is received."""
        import torch

        made = [torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        return made[0], made[1]

    def exchange(self, node: int, size: int) -> tuple[float, float]:
        """Seconds of a large and of a tiny exchange, both ways at once, with a peer on this rail.

        The fastest counts: what else happens makes an exchange slower, and none faster.
        """
        peer = node * self.per_node + self.rail
        return (
            self._fastest(peer, size, PAIR_REPEATS),
            self._fastest(peer, LATENCY_BYTES, LATENCY_REPEATS),
        )

    def _fastest(self, peer: int, size: int, repeats: int) -> float:
        import torch.distributed as dist

        out, into = self.buffers(size)
        fastest = float("inf")
        for repeat in range(repeats + 1):
            began = time.perf_counter()
            operations = [dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, into, peer)]
            for each in dist.batch_isend_irecv(operations):
                each.wait()
            self.synchronize()
            if repeat:  # the first one makes the connection, and waits for the peer
                fastest = min(fastest, time.perf_counter() - began)
        return fastest

    def leave(self) -> None:
        """End it in order."""
        import torch.distributed as dist

        self.barrier()
        dist.destroy_process_group()
