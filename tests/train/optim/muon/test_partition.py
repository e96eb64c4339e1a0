"""Shares of the work: even, the same on every rank, and near to what ranks have anyway."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.train.optim.muon.matrices import MatrixLayout, logical_matrices
from phalanx.train.optim.muon.newton_schulz import flops
from phalanx.train.optim.muon.partition import MatrixShare, buckets, record, share_out

SHAPES = ((64, 32), (32, 32), (128, 32), (32, 64))  # of a layer; the first three as one
FUSED = ((32, 16, 16), (), (64, 64), ())
LAYERS = 6


def parameters() -> tuple[list[Tensor], list[tuple[int, ...]]]:
    made = [torch.empty(shape, device="meta") for shape in SHAPES * LAYERS]
    return made, list(FUSED * LAYERS)


def shared_out(ranks: int) -> list[MatrixShare]:
    made, fused = parameters()
    layouts = [MatrixLayout(each, range(ranks)) for each in made]
    return share_out(layouts, fused, range(len(made)), ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_each_logical_matrix_has_one_owner_and_the_work_is_even(ranks: int) -> None:
    shares = shared_out(ranks)
    assert len({share.matrices for share in shares}) == len(shares) == 7 * LAYERS
    found = record(shares, [str(n) for n in range(4 * LAYERS)], range(ranks))
    assert sum(found.work) == pytest.approx(1.0)
    assert max(found.work) < 1.15 / ranks
    assert found.summary.startswith(f"Muon orthogonalises {7 * LAYERS} matrices")
    assert shared_out(ranks) == shares  # nobody is asked


def test_what_all_ranks_have_is_not_gathered_and_every_result_is_told() -> None:
    assert {(share.gathered, share.returned) for share in shared_out(4)} == {(False, True)}
    assert {(share.gathered, share.returned) for share in shared_out(1)} == {(False, False)}


def test_frozen_parameters_have_no_share() -> None:
    made, fused = parameters()
    layouts = [MatrixLayout(each, range(2)) for each in made]
    assert {share.matrices.weight for share in share_out(layouts, fused, [1, 3], 2)} == {1, 3}


def test_experts_that_all_ranks_have_are_shared_out_evenly() -> None:
    layout = MatrixLayout(torch.empty(10, 12, 8, device="meta"), range(4))
    stacks = logical_matrices(0, layout, (6, 6), 4)
    assert [one.stack for one in stacks] == 2 * [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert [one.shape for one in stacks[:2]] == [(3, 6, 8), (3, 6, 8)]


def test_buckets_hold_what_travels_alike_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.train.optim.muon.partition.BUCKET_ELEMENTS", 4096)
    shares = shared_out(2)
    runs = list(buckets(shares, 2))
    assert [share for run in runs for share in run] == shares
    assert len(runs) > 2
    assert all(sum(share.matrices.whole.numel for share in run) <= 2 * 4096 for run in runs)


def test_every_bucket_has_work_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a matrix is larger than what a rank's share of a bucket usually is."""
    monkeypatch.setattr("phalanx.train.optim.muon.partition.BUCKET_ELEMENTS", 1)
    *runs, _ = buckets(shared_out(4), 4)
    assert len(runs) > 4
    assert all({share.owner for share in run} == {0, 1, 2, 3} for run in runs)


def test_work_counts_the_shorter_side_twice() -> None:
    assert flops(64, 16) == flops(16, 64) == 5 * (4 * 16 * 16 * 64 + 2 * 16**3)
