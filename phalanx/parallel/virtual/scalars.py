"""Loss and gradient norm of a step to the bit, whatever ranks hold which share of them.

Ranks exchange integers: their sums do not depend on an order. A loss travels as its bits. A norm
is made of the sums of squares of rows, which no sharding cuts, each summed in a fixed order in fp64
and cut into two integers on a scale that all ranks share.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.config import VirtualReplicas
from phalanx.parallel.virtual.tree import tree_sum

BITS = 40  # of each of the two integers; 2^22 rows of the largest size fit into their sums


def losses_by_replica(losses: Tensor, virtual: VirtualReplicas) -> Tensor:
    """Losses [virtual replicas] from those of a rank's micro-batches, in order.

    Those of others are zero.
    """
    by_replica = losses.view(len(virtual.own), -1)
    total = by_replica[:, 0]
    for i in range(1, by_replica.shape[1]):
        total = total + by_replica[:, i]
    spread = torch.zeros(virtual.total, device=losses.device)
    spread[list(virtual.own)] = total
    return spread


def exact_scalars(losses: Tensor, gradients: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of all losses [virtual replicas], and the squared norm in fp64.

    Each loss is given by one rank and zero on all others, each gradient by one rank only.
    """
    rows = [_row_squares(gradient) for gradient in gradients if gradient.numel()]
    squares = torch.cat(rows) if rows else torch.zeros(1, dtype=torch.float64)
    squares = squares.to(losses.device)
    most = squares.max().nan_to_num(nan=torch.inf, posinf=torch.inf)  # comparisons lose a NaN
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
    # The next power of two above the largest: multiplying by its inverse loses no bit.
    unit = torch.exp2(torch.frexp(most).exponent.double())
    scaled = torch.where(torch.isfinite(most), squares / unit, 0.0) * 2.0**BITS
    high = scaled.floor()
    low = (scaled - high) * 2.0**BITS
    bits = losses.view(torch.int32).long()
    shared = torch.cat((bits, torch.stack((high.long().sum(), low.long().sum()))))
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(shared)
    total = shared[-2].double() + shared[-1].double() * 2.0**-BITS
    norm = torch.where(torch.isfinite(most), total * unit * 2.0**-BITS, most)
    return tree_sum(shared[:-2].int().view(torch.float32)), norm


def _row_squares(gradient: Tensor) -> Tensor:
    """Sums of squares [rows] in fp64, halves added to halves: the order depends on nothing else."""
    x = gradient.reshape(len(gradient), -1)
    x = x.double().square_()
    while (width := x.shape[1]) > 1:
        half = width // 2
        added = x[:, :half] + x[:, half : 2 * half]
        if width % 2:
            added[:, 0] += x[:, -1]
        x = added
    return x[:, 0]
