"""Optimizer state on a GPU: formats of the moments, and state that lives in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.config import ConfigError, Optimizer
from phalanx.parallel import Weight
from phalanx.train.optim.away import host_state, nvme_state
from phalanx.train.optim.base import WeightOptimizer
from phalanx.train.optim.guard import GradientVerdict
from phalanx.train.optim.kernels import fused_adamw
from phalanx.train.optim.moments import Moments, decode, zero_moments
from phalanx.train.optim.optimizer import build_optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = {"embed.weight": (300, 256), "layers.0.mlp.down.weight": (128, 384), "norm.weight": (77,)}
FORMATS = ("float32", "bfloat16", "int8")
HYPER = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def weights(dtype: torch.dtype) -> list[Weight]:
    found, generator = [], torch.Generator("cuda").manual_seed(0)
    for name, shape in SHAPES.items():
        master = torch.randn(shape, generator=generator, device="cuda")
        parameter = nn.Parameter(master.to(dtype))
        same = parameter.detach() if dtype == torch.float32 else master
        found.append(Weight(name, parameter, same, copies=1))
    return found


def train(found: list[Weight], made: WeightOptimizer, steps: int) -> dict[str, Tensor]:
    """Steps on the same gradients each time; the third is skipped."""
    generator = torch.Generator("cuda").manual_seed(1)
    for step in range(steps):
        for weight in found:
            drawn = torch.randn(weight.parameter.shape, generator=generator, device="cuda")
            weight.parameter.grad = drawn.to(weight.parameter.dtype)
        skip = torch.tensor(step == 2, device="cuda")
        made.step(0.01, GradientVerdict(torch.tensor(0.5, device="cuda"), skip, skip))
    made.settle()
    state = {f"local.{weight.name}": weight.local for weight in found}
    state |= {f"master.{weight.name}": weight.master for weight in found}
    return {name: tensor.cpu().clone() for name, tensor in (state | made.tensors()).items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("format", FORMATS)
def test_state_in_host_memory_gives_the_same_bits(
    format: Any, kind: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_state, "STRETCH", 128 * 37)  # many stretches, and none fits evenly
    settings, results = Optimizer(kind=kind, state=format), []
    for offload in (False, True):
        found = weights(dtype)
        made = build_optimizer(found, settings, offload=offload)
        results.append(train(found, made, 5))
        assert all(weight.master.is_cuda != offload for weight in found)
        assert all(weight.master.is_pinned() for weight in found if offload)
    here, away = results
    assert here.keys() == away.keys()
    assert [name for name in here if not torch.equal(here[name], away[name])] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("format", FORMATS)
def test_state_in_a_file_gives_the_same_bits(
    format: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(nvme_state, "STRETCH", 1 << 17)  # the least that fills pages with scales
    monkeypatch.setitem(SHAPES, "layers.1.mlp.down.weight", (700, 512))
    results = []
    for folder in (None, tmp_path):
        found = weights(dtype)
        settings = Optimizer(state=format)
        made = build_optimizer(found, settings, offload=folder is not None, folder=folder)
        results.append(train(found, made, 5))
        assert all(weight.master.is_cuda == (folder is None) for weight in found)
    here, away = results
    assert here.keys() == away.keys()
    assert [name for name in here if not torch.equal(here[name], away[name])] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", FORMATS)
def test_the_kernel_keeps_moments_as_the_torch_form_does(format: Any) -> None:
    """Their roundings are drawn differently; both lie within one step of the exact value."""
    generator = torch.Generator("cuda").manual_seed(2)
    master = torch.randn(96, 256, generator=generator, device="cuda")
    ours, theirs = zero_moments(master, 256, format), zero_moments(master.cpu(), 256, format)
    mine, other = master.clone(), master.cpu()
    for step in range(1, 4):
        grad = torch.randn(96, 256, generator=generator, device="cuda") * 0.01
        scalars = {"step": float(step), "multiplier": 1.0, "skip": False}
        tensors = {name: torch.tensor(value) for name, value in scalars.items()}
        there = {name: tensor.cuda() for name, tensor in tensors.items()}
        fused_adamw(None, mine, ours, grad, **HYPER, **there)
        fused_adamw(None, other, theirs, grad.cpu(), **HYPER, **tensors)
    found, expected = decode(Moments(*(t.cpu() for t in ours.stored))), decode(theirs)
    close = {"float32": 1e-6, "bfloat16": 0.02, "int8": 0.08}[format]
    for one, another in zip(found, expected, strict=True):
        distance = (one - another).abs() / another.abs().max()
        assert distance.max() < close and distance.mean() < close / 4
        drift = abs(float((one.abs().sum() - another.abs().sum()) / another.abs().sum()))
        assert drift < 3e-3  # no rounding goes one way


def test_too_little_host_memory_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_state, "available_memory", lambda: 4 << 30)
    with pytest.raises(ConfigError) as caught:
        build_optimizer(weights(torch.bfloat16), Optimizer(), offload=True)
    assert "memory.offload" in str(caught.value) and "0.0 GB can be pinned" in str(caught.value)


def test_memory_can_be_pinned_again_after_an_optimizer_is_gone() -> None:
    for _ in range(3):
        found = weights(torch.bfloat16)
        made = build_optimizer(found, Optimizer(), offload=True)
        train(found, made, 1)
        del made, found
