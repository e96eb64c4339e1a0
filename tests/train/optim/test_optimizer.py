"""AdamW against torch's own, Muon's updates, and steps that must leave no trace."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.config import Optimizer
from phalanx.model.declare import BIAS, REPLICATED, Declaration
from phalanx.parallel import Weight
from phalanx.train.optim.base import WeightOptimizer
from phalanx.train.optim.guard import GradientVerdict
from phalanx.train.optim.muon import Muon
from phalanx.train.optim.muon.newton_schulz import orthogonalize
from phalanx.train.optim.optimizer import AdamW, build_optimizer

SHAPES = {
    "embed.weight": (13, 8),
    "layers.0.attention.qkv.weight": (12, 8),
    "layers.0.mlp.down.weight": (8, 20),
    "layers.0.moe.experts.gate_up": (3, 6, 8),
    "layers.0.moe.experts.gate_up_bias": (3, 6),
    "layers.0.moe.router.weight": (3, 8),
    "layers.0.mlp_norm.weight": (8,),
}
HIDDEN = {name for name in SHAPES if name.startswith("layers.0.") and "norm" not in name}
HIDDEN -= {"layers.0.moe.router.weight", "layers.0.moe.experts.gate_up_bias"}


DECLARED = {
    "layers.0.moe.experts.gate_up": Declaration(expert=True, decay=True, orthogonal=True),
    "layers.0.moe.experts.gate_up_bias": BIAS,
    "layers.0.moe.router.weight": Declaration(orthogonal=False),
}


def verdict(*, multiplier: float = 1.0, skip: bool = False) -> GradientVerdict:
    return GradientVerdict(torch.tensor(multiplier), torch.tensor(skip), torch.tensor(skip))


def weights(dtype: torch.dtype = torch.float32) -> list[Weight]:
    """Parameters of each kind; low-precision ones have fp32 masters beside them."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for name, shape in SHAPES.items():
        master = torch.randn(shape, generator=generator)
        parameter = nn.Parameter(master.to(dtype))
        if dtype == torch.float32:
            master = parameter.detach()
        declared = DECLARED.get(name, REPLICATED)
        found.append(Weight(name, parameter, master, 1, declared))
    return found


def set_gradients(found: list[Weight], step: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for weight in found:
        drawn = size * torch.randn(weight.parameter.shape, generator=generator)
        weight.parameter.grad = drawn.to(weight.parameter.dtype)


def state(optimizer: WeightOptimizer, found: list[Weight]) -> dict[str, Tensor]:
    """Every bit that an update may touch."""
    values = {f"master.{weight.name}": weight.master for weight in found}
    values |= {f"local.{weight.name}": weight.local for weight in found}
    return {name: value.clone() for name, value in (values | optimizer.tensors()).items()}


def torch_adamw(found: list[Weight], settings: Optimizer) -> torch.optim.AdamW:
    """torch's optimizer over copies of the masters; decay on matrices only."""
    copies = [nn.Parameter(weight.master.clone()) for weight in found]
    flat = [w.parameter.ndim == 1 or w.name.endswith("bias") for w in found]
    decayed = [p for p, no in zip(copies, flat, strict=True) if not no]
    kept = [p for p, no in zip(copies, flat, strict=True) if no]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    made = torch.optim.AdamW(
        groups,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        foreach=False,
    )
    made.copies = copies  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", [False, True])
def test_adamw_equals_torch_over_twenty_steps(dtype: torch.dtype, offload: bool) -> None:
    settings = Optimizer(learning_rate=0.01, weight_decay=0.2)
    found = weights(dtype)
    reference: Any = torch_adamw(found, settings)
    optimizer = AdamW(found, settings, offload)
    for step in range(20):
        rate = settings.learning_rate * (1 + step) / 20
        set_gradients(found, step)
        for group in reference.param_groups:
            group["lr"] = rate
        for copy, weight in zip(reference.copies, found, strict=True):
            assert weight.parameter.grad is not None
            copy.grad = 0.5 * weight.parameter.grad.float()
        reference.step()
        optimizer.step(rate, verdict(multiplier=0.5))
    for copy, weight in zip(reference.copies, found, strict=True):
        assert weight.master.dtype == torch.float32
        torch.testing.assert_close(weight.master, copy.detach(), rtol=2e-6, atol=2e-6)
        assert weight.parameter.dtype == dtype
        assert torch.equal(weight.local, weight.master.to(dtype))
    assert optimizer.step_count == 20


def test_small_updates_reach_the_master_though_bf16_cannot_show_them() -> None:
    found = weights(torch.bfloat16)
    before = [weight.master.clone() for weight in found]
    optimizer = AdamW(found, Optimizer(learning_rate=1e-5, weight_decay=0.0), offload=False)
    for step in range(4):
        set_gradients(found, step)
        optimizer.step(1e-5, verdict())
    moved = [(w.master - old).abs().max().item() for w, old in zip(found, before, strict=True)]
    assert all(0 < distance < 1e-4 for distance in moved)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1.0])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_skipped_step_leaves_every_bit(
    kind: str, dtype: torch.dtype, offload: bool, bad: float, steps_before: int
) -> None:
    found = weights(dtype)
    optimizer = build_optimizer(found, Optimizer(kind=kind), offload=offload)  # type: ignore[arg-type]
    for step in range(steps_before):
        set_gradients(found, step)
        optimizer.step(0.01, verdict())
    before = state(optimizer, found)
    set_gradients(found, 50, size=bad)
    optimizer.step(0.01, verdict(multiplier=bad, skip=True))
    after = state(optimizer, found)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    set_gradients(found, 51)
    optimizer.step(0.01, verdict())
    for weight in found:
        assert not torch.equal(before[f"master.{weight.name}"], weight.master)
        assert torch.equal(weight.local, weight.master.to(dtype))


def test_a_skipped_step_does_not_count_for_bias_correction() -> None:
    settings = Optimizer()
    plain, skipping = weights(), weights()
    first, second = AdamW(plain, settings, False), AdamW(skipping, settings, False)
    for step in range(3):
        set_gradients(plain, step)
        first.step(0.01, verdict())
        set_gradients(skipping, 99)
        second.step(0.01, verdict(skip=True))
        set_gradients(skipping, step)
        second.step(0.01, verdict())
    for a, b in zip(plain, skipping, strict=True):
        assert torch.equal(a.master, b.master)


@pytest.mark.parametrize("shape", [(24, 24), (40, 12), (12, 40), (5, 16, 24)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape: tuple[int, ...]) -> None:
    u, _, vh = torch.linalg.svd(
        torch.randn(shape, generator=torch.Generator().manual_seed(3)), full_matrices=False
    )
    matrix = u * torch.linspace(1.0, 0.1, min(shape[-2:])) @ vh
    size = max(1.0, shape[-2] / shape[-1]) ** 0.5
    found = orthogonalize(matrix) / size
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.6
    assert values.max() < 1.25
    # The directions are the matrix's own: u v^T of its singular value decomposition.
    alignment = (found * (u @ vh)).sum((-2, -1)) / min(shape[-2:])
    assert alignment.min() > 0.8


def test_the_size_of_a_gradient_does_not_change_its_orthogonal_update() -> None:
    matrix = torch.randn(10, 14, generator=torch.Generator().manual_seed(3))
    first, second = orthogonalize(matrix), orthogonalize(1e-3 * matrix)
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-3)


def test_muon_takes_hidden_matrices_and_leaves_the_rest_to_adamw() -> None:
    settings = Optimizer(kind="muon", learning_rate=0.01, muon_learning_rate=0.05)
    found, plain = weights(), weights()
    muon, adamw = build_optimizer(found, settings, offload=False), AdamW(plain, settings, False)
    assert isinstance(muon, Muon)
    assert {weight.name for weight in muon.matrices} == HIDDEN
    for step in range(3):
        for some in (found, plain):
            set_gradients(some, step)
        muon.step(0.01, verdict())
        adamw.step(0.01, verdict())
    for a, b in zip(found, plain, strict=True):
        assert torch.equal(a.master, b.master) == (a.name not in HIDDEN), a.name
    tensors = muon.tensors()
    assert {f"optimizer.momentum.{name}" for name in HIDDEN} < tensors.keys()
    assert not any(f"optimizer.exp_avg.{name}" in tensors for name in HIDDEN)


def test_muons_first_update_is_decay_and_an_orthogonal_step_at_its_own_rate() -> None:
    settings = Optimizer(kind="muon", learning_rate=0.01, muon_learning_rate=0.05, weight_decay=0.1)
    found = weights()
    before = {weight.name: weight.master.clone() for weight in found}
    optimizer = build_optimizer(found, settings, offload=False)
    set_gradients(found, 0)
    optimizer.step(0.005, verdict())  # half of the peak: Muon's rate is halved as well
    for weight in found:
        if weight.name in HIDDEN:
            assert weight.parameter.grad is not None
            expected = before[weight.name] * (1 - 0.025 * 0.1)
            expected -= 0.025 * orthogonalize(weight.parameter.grad)
            torch.testing.assert_close(weight.master, expected)


def muons_first_update(gradient: Tensor, fused: tuple[int, ...]) -> Tensor:
    """What a parameter that began at zero is after a step at the rate one."""
    settings = Optimizer(kind="muon", learning_rate=1.0, muon_learning_rate=1.0)
    parameter = nn.Parameter(torch.zeros_like(gradient))
    said = Declaration(orthogonal=True, fused=fused)
    weight = Weight("layers.0.matrices", parameter, parameter.detach(), 1, said)
    parameter.grad = gradient
    build_optimizer([weight], settings, offload=False).step(1.0, verdict())
    return -weight.master


def test_muon_takes_matrices_that_are_stored_as_one_each_by_itself() -> None:
    """Queries, keys and values as they lie in ``qkv``: by key/value head."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(rows, 24, generator=generator) for rows in (16, 8, 8))
    heads = [
        part
        for n in range(2)
        for part in (q[8 * n : 8 * n + 8], k[4 * n : 4 * n + 4], v[4 * n : 4 * n + 4])
    ]
    done = muons_first_update(torch.cat(heads), (8, 4, 4)).unflatten(0, (2, 16))
    apart = [part.flatten(0, 1) for part in done.split((8, 4, 4), dim=1)]
    for one, whole in zip(apart, (q, k, v), strict=True):
        torch.testing.assert_close(one, orthogonalize(whole))
    experts = torch.randn(3, 12, 8, generator=generator)
    halves = muons_first_update(experts, (6, 6)).chunk(2, dim=1)
    for one, whole in zip(halves, experts.chunk(2, dim=1), strict=True):
        torch.testing.assert_close(one, orthogonalize(whole))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_loss_descends(kind: str) -> None:
    generator = torch.Generator().manual_seed(7)
    target, x = torch.randn(12, 8, generator=generator), torch.randn(64, 8, generator=generator)
    parameter = nn.Parameter(torch.zeros(12, 8))
    weight = Weight("layers.0.mlp.down.weight", parameter, parameter.detach(), copies=1)
    settings = Optimizer(kind=kind, weight_decay=0.0)  # type: ignore[arg-type]
    optimizer = build_optimizer([weight], settings, offload=False)
    losses = []
    for _ in range(60):
        parameter.grad = None
        loss = (x @ (parameter - target).t()).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step(settings.learning_rate * (100 if kind == "adamw" else 2), verdict())
    assert losses[-1] < 0.3 * losses[0]


def test_a_weight_without_a_gradient_has_zeros_where_it_computes() -> None:
    """Its master may live elsewhere; another device stands in for host memory."""
    parameter = nn.Parameter(torch.ones(3, 4))
    weight = Weight("embed.weight", parameter, torch.empty(3, 4, device="meta"), copies=1)
    assert weight.gradient.device == parameter.device and not weight.gradient.any()
