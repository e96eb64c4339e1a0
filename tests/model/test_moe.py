"""Mixture of experts against a dense reference: routing, weights, balance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.config import Moe
from phalanx.model import ForwardContext, MoeLayer
from phalanx.model.moe import grouped_linear

DIM, EXPERTS, TOP_K, FFN = 12, 6, 2, 16
BATCH, SEQUENCE = 3, 10
TOKEN_WEIGHT = 0.05


def layer(**fields: Any) -> MoeLayer:
    """A layer whose router tells tokens apart."""
    moe = Moe(**{"experts": EXPERTS, "top_k": TOP_K, "ffn": FFN, **fields})
    made = MoeLayer(DIM, moe)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in made.named_parameters():
        std = 0.6 if "router" in name else 0.3
        parameter.data.copy_(std * torch.randn(parameter.shape, generator=generator))
    return made


def hidden(seed: int = 1) -> Tensor:
    return torch.randn(BATCH, SEQUENCE, DIM, generator=torch.Generator().manual_seed(seed))


def context(real: Tensor | None = None) -> ForwardContext:
    empty = torch.empty(0)
    return ForwardContext(
        empty, empty, mask=None, real=real, token_weight=torch.tensor(TOKEN_WEIGHT)
    )


def some_weightless() -> Tensor:
    """One sample with a weightless tail, one wholly real, one wholly weightless."""
    real = torch.ones(BATCH, SEQUENCE, dtype=torch.bool)
    real[0, 6:] = False
    real[2] = False
    return real


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def scores_of(moe: MoeLayer, x: Tensor) -> Tensor:
    logits = x @ moe.router.weight.t()
    return logits.softmax(-1) if moe.router.moe.score == "softmax" else logits.sigmoid()


def dense_reference(moe: MoeLayer, x: Tensor) -> Tensor:
    """Every token through every expert, then weighted by what the router chose."""
    config = moe.router.moe
    scores = scores_of(moe, x)
    chosen = (scores + moe.router.expert_bias).topk(config.top_k, -1).indices
    weights = torch.zeros_like(scores)
    weights.scatter_(-1, chosen, scores.gather(-1, chosen))
    if config.normalize_top_k:
        weights = weights / weights.sum(-1, keepdim=True)
    gates, ups = moe.experts.gate_up.chunk(2, dim=1)
    every = torch.stack(
        [swiglu(x, gates[e], ups[e], moe.experts.down[e]) for e in range(config.experts)], dim=-2
    )
    return (every * weights.unsqueeze(-1)).sum(-2) * config.route_scale


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_every_token_reaches_its_experts(score: str, normalize: bool) -> None:
    moe = layer(score=score, normalize_top_k=normalize, route_scale=1.7)
    x, reference_x = hidden().requires_grad_(), hidden().requires_grad_()
    # The balance loss has its own test: it would add to the gradients here.
    found, expected = moe.eval()(x, context()), dense_reference(moe, reference_x)
    torch.testing.assert_close(found, expected)
    probe = hidden(2)
    parameters = list(moe.parameters())
    gradients = torch.autograd.grad((found * probe).sum(), [x, *parameters])
    slopes = torch.autograd.grad((expected * probe).sum(), [reference_x, *parameters])
    for gradient, slope in zip(gradients, slopes, strict=True):
        torch.testing.assert_close(gradient, slope)


def test_biases_of_router_and_experts_take_part() -> None:
    moe = layer(biases=True)
    gate_up, down, x = moe.experts.gate_up_bias, moe.experts.down_bias, hidden()
    assert moe.router.bias is not None and gate_up is not None and down is not None
    scores = (x @ moe.router.weight.t() + moe.router.bias).softmax(-1)
    weights, experts = scores.topk(TOP_K, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    expected = torch.zeros_like(x)
    for where in torch.cartesian_prod(torch.arange(BATCH), torch.arange(SEQUENCE)).tolist():
        for share, e in zip(weights[*where], experts[*where], strict=True):
            pairs = moe.experts.gate_up[e] @ x[*where] + gate_up[e]
            inner = F.silu(pairs[:FFN]) * pairs[FFN:]
            expected[*where] += share * (moe.experts.down[e] @ inner + down[e])
    torch.testing.assert_close(moe.eval()(x, context()), expected)


def test_no_token_is_dropped_when_all_want_the_same_experts() -> None:
    moe = layer()
    x = hidden()[:, :1].expand(-1, SEQUENCE, -1)
    torch.testing.assert_close(moe(x, context()), dense_reference(moe, x))


def test_shared_experts_serve_every_token() -> None:
    moe = layer(shared_experts=2)
    assert moe.shared is not None
    assert moe.shared.down.weight.shape == (DIM, 2 * FFN)
    pairs = moe.shared.gate_up.weight.view(-1, 2, moe.shared.group_width, DIM)
    gate, up = pairs[:, 0].flatten(0, 1), pairs[:, 1].flatten(0, 1)
    x = hidden()
    expected = dense_reference(moe, x) + swiglu(x, gate, up, moe.shared.down.weight)
    torch.testing.assert_close(moe(x, context()), expected)


def test_the_width_of_shared_experts_may_be_given() -> None:
    shared = layer(shared_experts=1, shared_ffn=40).shared
    assert shared is not None and shared.down.weight.shape == (DIM, 40)


def test_grouped_linear_applies_each_expert_to_its_rows() -> None:
    generator = torch.Generator().manual_seed(3)
    counts = torch.tensor([3, 0, 5, 1])
    x = torch.randn(9, 16, generator=generator)
    weight = torch.randn(4, 24, 16, generator=generator)
    owner = torch.repeat_interleave(torch.arange(4), counts)
    expected = torch.stack([weight[e] @ row for e, row in zip(owner, x, strict=True)])
    torch.testing.assert_close(grouped_linear(x, weight, counts), expected)


def test_the_grouped_kernel_and_the_loop_agree() -> None:
    """The kernel that CUDA uses also runs here; both get the offsets of the same counts."""
    generator = torch.Generator().manual_seed(4)
    counts = torch.tensor([3, 0, 5, 1])
    x = torch.randn(9, 16, generator=generator).bfloat16()
    weight = torch.randn(4, 24, 16, generator=generator).bfloat16()
    kernel = F.grouped_mm(x, weight.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    torch.testing.assert_close(grouped_linear(x, weight, counts), kernel, rtol=2e-2, atol=2e-2)


def auxiliary_loss(moe: MoeLayer, x: Tensor, real: Tensor) -> Tensor:
    """coefficient * E / k * sum over samples of tokens * sum over experts of (share of the
    choices that fell on the expert) * (mean probability of the expert), real tokens only.
    """
    config = moe.router.moe
    total = torch.zeros(())
    for sample, mask in zip(x, real, strict=True):
        if not mask.any():
            continue
        scores = scores_of(moe, sample[mask])
        probability = (scores / scores.sum(-1, keepdim=True)).mean(0)
        chosen = scores.topk(config.top_k, -1).indices
        routed = torch.bincount(chosen.flatten(), minlength=config.experts) / mask.sum()
        total = total + mask.sum() * (routed * probability).sum()
    return config.auxiliary_coefficient * config.experts / config.top_k * total * TOKEN_WEIGHT


def balance_gradients(moe: MoeLayer, x: Tensor, real: Tensor | None) -> tuple[Tensor, ...]:
    """Gradients of router and input when the output itself sends none."""
    x = x.clone().requires_grad_()
    moe.train()
    return torch.autograd.grad(moe(x, context(real)).sum() * 0.0, (moe.router.weight, x))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("masked", [True, False])
def test_the_auxiliary_loss_has_the_gradient_of_its_formula(score: str, masked: bool) -> None:
    moe = layer(score=score, auxiliary_coefficient=0.3)
    real = some_weightless() if masked else torch.ones(BATCH, SEQUENCE, dtype=torch.bool)
    found = balance_gradients(moe, hidden(), real if masked else None)
    x = hidden().requires_grad_()
    expected = torch.autograd.grad(auxiliary_loss(moe, x, real), (moe.router.weight, x))
    assert expected[0].abs().max() > 1e-4
    for gradient, slope in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, slope)


def test_weightless_tokens_do_not_influence_the_auxiliary_loss() -> None:
    moe = layer(auxiliary_coefficient=0.3)
    real = some_weightless()
    other = torch.where(real.unsqueeze(-1), hidden(), 5 * hidden(7))
    first, second = (balance_gradients(moe, x, real) for x in (hidden(), other))
    torch.testing.assert_close(first[0], second[0])
    assert second[1][~real].count_nonzero() == 0


@pytest.mark.parametrize("balance", ["none", "bias"])
def test_without_the_auxiliary_loss_balance_sends_no_gradient(balance: str) -> None:
    router, x = balance_gradients(layer(balance=balance), hidden(), None)
    assert router.count_nonzero() == x.count_nonzero() == 0


def test_the_loss_over_batches_has_the_gradient_of_its_formula_with_the_last_shares() -> None:
    moe = layer(balance="bias-auxiliary", auxiliary_over="batch", auxiliary_coefficient=0.3)
    real, x = some_weightless(), hidden()
    even = balance_gradients(moe, x, real)
    assert even[0].abs().max() < 1e-6, "equal shares ask for nothing"
    load = moe.router.load.clone()
    assert load.sum() == real.sum() * TOP_K
    moe.router.end_step()
    assert moe.router.load_share is not None
    torch.testing.assert_close(moe.router.load_share, load / load.sum())
    found = balance_gradients(moe, x, real)
    x = x.requires_grad_()
    scores = scores_of(moe, x[real])
    probability = (scores / scores.sum(-1, keepdim=True)).sum(0)
    loss = 0.3 * EXPERTS * (probability * load / load.sum()).sum() * TOKEN_WEIGHT
    expected = torch.autograd.grad(loss, (moe.router.weight, x))
    assert expected[0].abs().max() > 1e-4
    for gradient, slope in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, slope)


def test_bias_and_loss_work_together() -> None:
    both = layer(balance="bias-auxiliary", auxiliary_coefficient=0.3, bias_rate=0.125)
    alone = layer(balance="auxiliary", auxiliary_coefficient=0.3)
    gradients = [balance_gradients(each, hidden(), None) for each in (both, alone)]
    for found, expected in zip(*gradients, strict=True):
        assert torch.equal(found, expected), "the bias is zero yet"
    load = both.router.load.clone()
    both.router.end_step()
    assert torch.equal(both.router.expert_bias, 0.125 * torch.sign(load.mean() - load))
    assert alone.router.load.count_nonzero() == 0


def test_a_step_without_loads_changes_neither_bias_nor_shares() -> None:
    moe = layer(balance="bias-auxiliary", auxiliary_over="batch")
    moe(hidden(), context())
    moe.router.end_step()
    assert moe.router.load_share is not None
    bias, shares = moe.router.expert_bias.clone(), moe.router.load_share.clone()
    moe.router.end_step()
    assert torch.equal(moe.router.expert_bias, bias)
    assert torch.equal(moe.router.load_share, shares)


def test_evaluation_attaches_no_loss_and_counts_no_load() -> None:
    moe = layer(balance="bias").eval()
    moe(hidden(), context())
    assert moe.router.load.count_nonzero() == 0
    auxiliary = layer(auxiliary_coefficient=0.3).eval()
    out = auxiliary(hidden(), context())
    (gradient,) = torch.autograd.grad(out.sum() * 0.0, auxiliary.router.weight)
    assert gradient.count_nonzero() == 0


def test_weightless_tokens_do_not_count_as_load() -> None:
    moe = layer(balance="bias")
    real = some_weightless()
    moe(hidden(), context(real))
    first = moe.router.load.clone()
    assert first.sum() == real.sum() * TOP_K
    moe.router.load.zero_()
    moe(torch.where(real.unsqueeze(-1), hidden(), 5 * hidden(7)), context(real))
    assert torch.equal(moe.router.load, first)


def test_load_adds_up_over_micro_batches_until_the_step_ends() -> None:
    moe = layer(balance="bias", bias_rate=0.125)
    moe(hidden(1), context())
    moe(hidden(2), context())
    load = moe.router.load.clone()
    assert load.sum() == 2 * BATCH * SEQUENCE * TOP_K
    moe.router.end_step()
    assert torch.equal(moe.router.expert_bias, 0.125 * torch.sign(load.mean() - load))
    assert moe.router.load.count_nonzero() == 0


def test_the_bias_steers_the_choice_but_not_the_weights() -> None:
    moe = layer(balance="bias", score="sigmoid")
    moe.router.expert_bias[3] = 10.0
    _, weights, experts = moe.router(hidden(), context())
    assert (experts == 3).any(-1).all()
    chosen = scores_of(moe, hidden()).gather(-1, experts)
    torch.testing.assert_close(weights, chosen / chosen.sum(-1, keepdim=True))
    torch.testing.assert_close(moe(hidden(), context()), dense_reference(moe, hidden()))


def test_bias_balancing_moves_the_load_towards_balance() -> None:
    moe = layer(balance="bias", score="sigmoid", bias_rate=0.01)
    moe.router.weight.data[0] = moe.router.weight.data.mean(0)
    x = hidden() + 0.5 * moe.router.weight.data[1]  # everyone likes expert 1

    def imbalance() -> float:
        moe(x, context())
        load = moe.router.load.clone()
        moe.router.end_step()
        return float(load.max() / load.mean())

    before = imbalance()
    for _ in range(100):
        after = imbalance()
    assert before > 2.0
    assert after < 1.4


def test_tokens_stay_in_the_groups_whose_two_best_experts_score_highest() -> None:
    moe = layer(experts=8, top_k=3, groups=4, top_groups=2, score="sigmoid")
    x = hidden()
    _, weights, experts = moe.router(x, context())
    scores = scores_of(moe, x)
    for token, (chosen, weight) in zip(
        scores.flatten(0, 1).tolist(),
        zip(experts.flatten(0, 1).tolist(), weights.flatten(0, 1).tolist(), strict=True),
        strict=True,
    ):
        pairs = [token[first : first + 2] for first in range(0, 8, 2)]
        open_groups = sorted(range(4), key=lambda group: -sum(pairs[group]))[:2]
        allowed = [expert for expert in range(8) if expert // 2 in open_groups]
        best = sorted(allowed, key=lambda expert: -token[expert])[:3]
        assert set(chosen) == set(best)
        total = sum(token[expert] for expert in best)
        assert weight == pytest.approx([token[expert] / total for expert in chosen], rel=1e-5)


def test_groups_change_the_choice_that_would_be_made_among_all() -> None:
    free = layer(experts=8, top_k=3).router(hidden(), context())[2]
    grouped = layer(experts=8, top_k=3, groups=4, top_groups=2).router(hidden(), context())[2]
    assert (free.sort(-1).values != grouped.sort(-1).values).any()


@pytest.mark.parametrize("masked", [False, True])
def test_the_z_loss_has_the_gradient_of_its_formula(masked: bool) -> None:
    moe = layer(balance="none", z_loss_coefficient=0.3)
    real = some_weightless() if masked else None
    x = hidden().requires_grad_()
    (moe.router(x, context(real))[0] * 0).sum().backward()
    found = moe.router.weight.grad
    moe.router.weight.grad = None
    squares = (hidden() @ moe.router.weight.t()).logsumexp(-1) ** 2
    if real is not None:
        squares = squares * real
    (squares.sum() * 0.3 * TOKEN_WEIGHT).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, moe.router.weight.grad)
    moe.eval()
    assert moe.router(x, context(real))[0] is x
