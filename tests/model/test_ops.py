"""The plain torch forms of the fused steps, which the CUDA kernels are tested against."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from phalanx.model import ops


def test_join_returns_the_sum_and_its_norm() -> None:
    x, branch, weight = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.rand(8)
    total, normed = ops.add_rms_norm(x, branch, weight, 1e-5)
    root = (x + branch).square().mean(-1, keepdim=True).add(1e-5).rsqrt()
    torch.testing.assert_close(total, x + branch)
    torch.testing.assert_close(normed, (x + branch) * root * weight)


def test_join_without_a_branch_hands_x_on() -> None:
    x, weight = torch.randn(2, 3, 8), torch.ones(8)
    total, _ = ops.add_rms_norm(x, None, weight, 1e-5)
    assert total is x


@pytest.mark.parametrize("groups", [1, 4])
def test_swiglu_pairs_each_gate_with_the_up_of_its_group(groups: int) -> None:
    gate, up = torch.randn(3, groups, 6), torch.randn(3, groups, 6)
    pairs = torch.stack((gate, up), dim=2).flatten(1)
    torch.testing.assert_close(ops.swiglu(pairs, 6), (F.silu(gate) * up).flatten(1))


def test_a_contiguous_half_of_the_packed_rows_holds_half_of_the_heads() -> None:
    queries, head_dim = 3, 4
    packed = torch.randn(2, 5, 4 * (queries + 2) * head_dim)
    angle = torch.randn(5, head_dim // 2)
    whole = ops.split_rope(packed, angle.cos(), angle.sin(), queries, head_dim)
    half = ops.split_rope(packed.chunk(2, dim=-1)[1], angle.cos(), angle.sin(), queries, head_dim)
    for all_heads, some_heads in zip(whole, half, strict=True):
        torch.testing.assert_close(all_heads.chunk(2, dim=2)[1], some_heads)


def test_rotation_keeps_the_angle_between_equally_far_positions() -> None:
    angle = torch.arange(6.0)[:, None] * torch.tensor([1.0, 0.1])
    x = torch.randn(1, 1, 1, 4).expand(1, 6, 1, 4)
    turned = ops.apply_rope(x, angle.cos(), angle.sin())[0, :, 0]
    products = turned @ turned.t()
    for distance in range(6):
        torch.testing.assert_close(
            products.diagonal(distance), products[0, distance].expand(6 - distance)
        )


def test_linear_equals_torch() -> None:
    x, weight = torch.randn(2, 3, 8), torch.randn(5, 8)
    torch.testing.assert_close(ops.linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("turn_a", [False, True])
@pytest.mark.parametrize("turn_b", [False, True])
def test_matmul_turns_what_it_is_told_to(turn_a: bool, turn_b: bool) -> None:
    a, b = torch.randn(4, 6), torch.randn(6, 5)
    found = ops.matmul(
        a.t().contiguous() if turn_a else a,
        b.t().contiguous() if turn_b else b,
        turn_a=turn_a,
        turn_b=turn_b,
    )
    torch.testing.assert_close(found, a @ b)
