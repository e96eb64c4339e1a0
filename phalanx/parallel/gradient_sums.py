"""What the gradients of one micro-batch add up to, while they are still this rank's own.

FSDP hands the gradients of every unit to a reduce-scatter: the last place where no other rank has
a share in them. Two ranks that compute the same micro-batch with the same weights hand over the
same bits there, if their kernels are deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
MULTIPLIER = 6364136223846793005  # odd: no bit of an earlier sum is lost, and their order counts


class GradientSums:
    """Adds up the bits of gradients on their way out of this rank: any flipped one is seen.

    ``micro_batch``: which one of the next step; None: none of it.
    """

    def __init__(self, part: nn.Module, device: torch.device) -> None:
        self.micro_batch: int | None = None
        self.discards = False  # what is computed meets nobody else's
        self._device, self._adds = device, False
        # One tensor from the start: the sums are made on the stream of the reduce-scatters.
        self.total = torch.zeros((), dtype=torch.int64, device=device)
        comm = _SummedReduceScatter(self)
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(comm)

    @contextmanager
    def of(self, micro_batch: int) -> Iterator[None]:
        """Around a micro-batch of a step: it is added up if it is the one."""
        if micro_batch != self.micro_batch:
            yield
            return
        self.micro_batch = None
        with self.taken():
            yield

    @contextmanager
    def taken(self, *, discard: bool = False) -> Iterator[None]:
        """Around forward and backward of one micro-batch, whose sum is then ``total``."""
        self.total.zero_()
        self._adds, self.discards = True, discard
        try:
            with deterministic_kernels(self._device):
                yield
        finally:
            self._adds = self.discards = False

    def add(self, gradients: Tensor) -> None:
        """Called with what is about to be reduced."""
        if self._adds:
            bits = gradients.detach().reshape(-1).view(BITS[gradients.element_size()])
            self.total.mul_(MULTIPLIER).add_(bits.sum(dtype=torch.int64))


class _SummedReduceScatter(DefaultReduceScatter):
    """FSDP's own reduce-scatter, which shows its input to ``sums`` before."""

    def __init__(self, sums: GradientSums) -> None:
        self._sums = sums

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **named: Any
    ) -> Any:
        self._sums.add(input_tensor)
        if self._sums.discards:
            return None  # nobody reads the output either
        return super().__call__(output_tensor, input_tensor, *args, **named)


@contextmanager
def deterministic_kernels(device: torch.device) -> Iterator[None]:
    """Inside, equal inputs give equal bits on every device of a kind. On CPU they always do.

    An operator that cannot ends the run, as with ``train.deterministic``: where torch only warns,
    attention keeps its fast backward, whose sums come in any order.
    """
    if device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
