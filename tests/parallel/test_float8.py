"""fp8 blocks by their plain torch form: scales, both orders, gradients, and that they learn."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from phalanx.config import PRESETS
from phalanx.model import Transformer
from phalanx.parallel import float8
from phalanx.parallel.float8 import Float8Block, Float8Linear, apply_float8


def small_model() -> Transformer:
    torch.manual_seed(0)
    model = Transformer(PRESETS["tiny"])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05) if parameter.ndim > 1 else parameter.data.fill_(
            1
        )
    model.prepare(torch.arange(32))
    model.token_weight /= 64
    return model


def in_float8(model: Transformer) -> Transformer:
    twin = copy.deepcopy(model)
    for block in twin.layers.values():
        apply_float8(block)
    return twin


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_the_largest_value_fits_and_uses_the_upper_half_of_the_range() -> None:
    x = torch.randn(64, 48) * 1e-7
    q = float8.quantize(x, float8.measure(x), float8.FORWARD, rows=True)
    largest = torch.finfo(float8.FORWARD).max
    assert largest / 2 < q.rows.float().abs().max() <= largest
    assert relative(q.rows.float() * q.scale, x) < 0.04


def test_both_orders_hold_the_same_values() -> None:
    x = torch.randn(32, 16)
    q = float8.quantize_gradient(x)
    assert torch.equal(q.columns.t().float(), q.rows.float())


def test_a_gradient_above_all_sampled_ones_still_fits() -> None:
    x = torch.ones(64, 16)
    x[7, 3] = 50.0  # not in a sampled row
    q = float8.quantize_gradient(x)
    assert relative(q.rows.float() * q.scale, x) < 0.15


def test_a_normed_value_never_exceeds_its_bound() -> None:
    x = torch.zeros(16, 64)
    x[:, 5] = 1e4  # the most extreme row a norm can see
    weight = torch.rand(64) + 0.5
    _, rstd = float8.join_statistics(x, None, 1e-5)
    q = float8.norm_quantize(x, rstd, weight, rows=True)
    assert relative(q.rows.float() * q.scale, x * rstd[:, None] * weight) < 0.07


def test_layers_are_swapped_and_keep_their_parameters() -> None:
    model = small_model()
    twin = in_float8(model)
    assert [n for n, _ in twin.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert all(isinstance(block, Float8Block) for block in twin.layers.values())
    linears = [m for m in twin.modules() if isinstance(m, Float8Linear)]
    assert len(linears) == 4 * len(twin.layers)


@pytest.mark.parametrize("opened", [True, False])
def test_gradients_point_where_exact_ones_do(opened: bool) -> None:
    exact = small_model()
    rough = in_float8(exact)
    if not opened:  # a hook, as tensor parallelism attaches it, keeps the block's parts apart
        for block in rough.layers.values():
            block.attention.register_forward_hook(lambda *_: None)
    tokens = torch.randint(4096, (2, 32))
    losses = [model(tokens, tokens) for model in (exact, rough)]
    for loss in losses:
        loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=5e-3)
    for (name, p), (_, q) in zip(exact.named_parameters(), rough.named_parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        cosine = torch.cosine_similarity(p.grad.flatten(), q.grad.flatten(), dim=0)
        assert cosine > 0.95, name


def test_it_learns_as_exact_layers_do() -> None:
    exact = small_model()
    tokens = torch.randint(4096, (2, 33))
    ends = []
    for model in (exact, in_float8(exact)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(12):
            loss = model(tokens[:, :-1], tokens[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ends.append(loss.item())
    assert ends[0] < 5.0
    assert ends[1] == pytest.approx(ends[0], rel=0.1)
