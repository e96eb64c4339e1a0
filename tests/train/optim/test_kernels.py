"""The fused AdamW update against torch's own optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.train.optim.kernels import fused_adamw
from phalanx.train.optim.moments import Moments

HYPER = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def update(
    state: list[Tensor], grad: Tensor, step: int, weight: Tensor | None, **how: Tensor
) -> None:
    scalars = {"multiplier": torch.ones(()), "skip": torch.tensor(False), **how}
    fused_adamw(
        weight,
        state[0],
        Moments(*state[1:]),
        grad,
        **HYPER,
        step=torch.tensor(float(step)),
        **scalars,
    )


def test_ten_updates_equal_torch() -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(7, 5))
    state = [parameter.detach().clone(), torch.zeros(7, 5), torch.zeros(7, 5)]
    optimizer = torch.optim.AdamW(
        [parameter], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    for step in range(1, 11):
        parameter.grad = torch.randn(7, 5)
        optimizer.step()
        update(state, parameter.grad, step, None)
        torch.testing.assert_close(state[0], parameter.detach(), rtol=1e-5, atol=1e-7)


def test_weight_is_the_rounded_master() -> None:
    state = [torch.randn(64), torch.zeros(64), torch.zeros(64)]
    weight = torch.empty(64, dtype=torch.bfloat16)
    update(state, torch.randn(64).bfloat16(), 1, weight)
    assert torch.equal(weight, state[0].bfloat16())


def test_multiplier_scales_the_gradient() -> None:
    grad, start = torch.randn(64), torch.randn(64)
    one, other = ([start.clone(), torch.zeros(64), torch.zeros(64)] for _ in range(2))
    update(one, grad, 1, None, multiplier=torch.tensor(0.25))
    update(other, grad * 0.25, 1, None)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_skipped_step_writes_nothing(bad: float) -> None:
    state = [torch.randn(8), torch.randn(8), torch.rand(8)]
    before = [t.clone() for t in state]
    weight = state[0].bfloat16()
    update(state, torch.full((8,), bad), 3, weight, skip=torch.tensor(True))
    for found, expected in zip([*state, weight], [*before, before[0].bfloat16()], strict=True):
        assert torch.equal(found, expected)
