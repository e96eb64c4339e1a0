"""Sums in the order of one binary tree, on one rank or over the ranks of a group.

Leaves are numbered, neighbours are added first. The sum of 2^k leaves from a multiple of 2^k on is
a node of the tree whoever computes it, so that ranks may each add up one and then go on together.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the first dim, whose length is a power of two."""
    while len(x) > 1:
        x = x[0::2] + x[1::2]
    return x[0]


class TreeSum:
    """Adds up leaves as they come, like a binary counter: it holds at most one node a level."""

    def __init__(self) -> None:
        self._nodes: list[Tensor | None] = []

    def add(self, leaf: Tensor) -> None:
        """The next leaf; its memory is the sum's from now on."""
        for level, left in enumerate(self._nodes):
            if left is None:
                self._nodes[level] = leaf
                return
            leaf = left.add_(leaf)
            self._nodes[level] = None
        self._nodes.append(leaf)

    def take(self) -> Tensor:
        """The sum of a power of two of leaves; none are left."""
        total, rest = self._nodes[-1], self._nodes[:-1]
        assert total is not None and not any(node is not None for node in rest)
        self._nodes = []
        return total


def reduce_scatter(output: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    """This rank's part of the sum over ranks; ``x`` is flat and holds a part for each."""
    parts = torch.empty_like(x)
    dist.all_to_all_single(parts, x, group=group)
    output.copy_(tree_sum(parts.view(group.size(), -1)))


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks of a flat tensor, whose memory may be used for it."""
    ranks, size = group.size(), x.numel()
    padded = torch.nn.functional.pad(x, (0, -size % ranks))
    part = padded.new_empty(len(padded) // ranks)
    reduce_scatter(part, padded, group)
    dist.all_gather(list(padded.view(ranks, -1).unbind()), part, group=group)
    return padded[:size]
