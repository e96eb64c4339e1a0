"""Sums in the order of one tree, and scalars that no order changes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from phalanx.parallel.virtual.scalars import exact_scalars
from phalanx.parallel.virtual.tree import TreeSum, all_reduce, tree_sum
from tests.ranks import run_ranks


def values(rows: int, columns: int = 33) -> Tensor:
    """Numbers of very different sizes, whose sum depends on its order."""
    generator = torch.Generator().manual_seed(rows)
    exponents = torch.randint(-12, 12, (rows, columns), generator=generator)
    return torch.randn(rows, columns, generator=generator) * 2.0**exponents


def test_leaves_that_come_one_by_one_give_the_sum_of_the_tree() -> None:
    leaves, total = values(16), TreeSum()
    for leaf in leaves:
        total.add(leaf.clone())
    found = total.take()
    assert torch.equal(found, tree_sum(leaves))
    assert not torch.equal(found, leaves.sum(0))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_go_on_where_their_own_sums_end(ranks: int) -> None:
    def own(rank_leaves: int) -> Tensor:
        first = torch.distributed.get_rank() * rank_leaves
        total = tree_sum(values(16)[first : first + rank_leaves])
        group = torch.distributed.group.WORLD
        assert group is not None
        return all_reduce(total, group)

    for found in run_ranks(ranks, own, 16 // ranks):
        assert torch.equal(found, tree_sum(values(16)))


def test_norms_are_exact_however_rows_are_divided() -> None:
    gradient, losses = values(64, 45), torch.zeros(4)
    _, whole = exact_scalars(losses, [gradient])
    for parts in (2, 7, 64):
        assert exact_scalars(losses, gradient.chunk(parts))[1] == whole
    assert whole.item() == pytest.approx(gradient.double().square().sum().item(), rel=1e-14)


def test_losses_of_four_ranks_arrive_to_the_bit() -> None:
    parts = values(1, 4)[0]

    def own() -> tuple[float, float]:
        rank = torch.distributed.get_rank()
        losses = torch.zeros(4)
        losses[rank] = parts[rank]
        total, squares = exact_scalars(losses, [values(64)[rank * 16 : rank * 16 + 16]])
        return total.item(), squares.item()

    expected = tree_sum(parts).item(), exact_scalars(torch.zeros(4), [values(64)])[1].item()
    assert run_ranks(4, own) == [expected] * 4


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_told(bad: float) -> None:
    gradient = torch.ones(3, 5)
    gradient[1, 2] = bad
    assert exact_scalars(torch.zeros(2), [gradient])[1].item() == math.inf
    assert exact_scalars(torch.zeros(2), [torch.zeros(3, 5)])[1].item() == 0.0
