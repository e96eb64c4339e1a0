"""Initial weights are a function of seed, name and element, so that every mesh draws the same."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phalanx.config import Moe
from phalanx.model import Transformer, declarations, fill, init, key_of
from tests.model.small_models import built, small_model

SHAPES = [(40,), (17, 24), (5, 6, 7)]


def drawn(
    shape: tuple[int, ...], key: int, offset: tuple[int, ...], extent: tuple[int, ...]
) -> Tensor:
    block = torch.empty(extent)
    fill(block, std=1.0, key=key, shape=shape, offset=offset)
    return block


def whole(shape: tuple[int, ...], key: int = 5) -> Tensor:
    return drawn(shape, key, (0,) * len(shape), shape)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """A shape, and the bounds of a block in each of its dims, possibly empty."""
    shape = draw(st.sampled_from(SHAPES))
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return shape, [(low, high) for low, high in bounds]


@given(block=blocks())
@settings(max_examples=80, deadline=None)
def test_any_block_equals_the_slice_of_the_whole(
    block: tuple[tuple[int, ...], list[tuple[int, int]]],
) -> None:
    shape, bounds = block
    offset, extent = tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds)
    part = whole(shape)[tuple(slice(a, b) for a, b in bounds)]
    assert torch.equal(drawn(shape, 5, offset, extent), part)


def test_drawing_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = [whole(shape) for shape in SHAPES]
    monkeypatch.setattr(init, "_CHUNK", 50)
    for shape, expected in zip(SHAPES, at_once, strict=True):
        assert torch.equal(whole(shape), expected)


def test_values_are_standard_normal() -> None:
    values = whole((400, 500)).double()
    count = values.numel()
    assert abs(values.mean()) < 4 / math.sqrt(count)
    assert values.std().item() == pytest.approx(1.0, abs=4 / math.sqrt(2 * count))
    assert (values.abs() < 1).double().mean().item() == pytest.approx(0.6827, abs=0.005)
    assert (values.abs() < 2).double().mean().item() == pytest.approx(0.9545, abs=0.003)
    assert 4 < values.abs().max() < 7


def test_neighbours_do_not_resemble_each_other() -> None:
    values = whole((400, 500))
    for a, b in ((values[:, :-1], values[:, 1:]), (values[:-1], values[1:])):
        correlation = torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]
        assert abs(correlation) < 0.012


def test_names_and_seeds_draw_unrelated_values() -> None:
    keys = [key_of(seed, name) for seed in (0, 1) for name in ("embed.weight", "head.weight")]
    assert len(set(keys)) == 4
    draws = torch.stack([whole((20_000,), key) for key in keys])
    others = torch.corrcoef(draws) - torch.eye(4)
    assert others.abs().max() < 0.04


def test_the_values_never_change() -> None:
    """A job that is run again after an upgrade starts from the same weights."""
    values = whole((3,), key_of(0, "embed.weight")).tolist()
    assert values == pytest.approx([-0.7981335, -0.5927575, -0.1405830], abs=1e-6)


def test_norms_start_at_one_and_residual_branches_small() -> None:
    config = small_model(layers=8, qk_norm=True)
    model = built(config, 4, gain=1.0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        small = name.endswith(("attention.out.weight", "mlp.down.weight"))
        expected = 0.02 / 4 if small else 0.02
        assert parameter.std().item() == pytest.approx(expected, rel=0.12), name


def test_every_parameter_of_every_kind_of_layer_has_a_rule() -> None:
    config = small_model(
        moe=Moe(experts=4, top_k=2, ffn=16, shared_experts=1, first_dense_layers=1)
    )
    with torch.device("meta"):
        found = dict(declarations(model := Transformer(config)))
    assert set(found) == {name for name, _ in model.named_parameters()}
    assert {name for name, declared in found.items() if declared.residual} == {
        "layers.0.attention.out.weight",
        "layers.1.attention.out.weight",
        "layers.0.mlp.down.weight",
        "layers.1.moe.experts.down",
        "layers.1.moe.shared.down.weight",
    }
    assert {name for name, declared in found.items() if declared.start == 1.0} == {
        name for name in found if "norm" in name
    }


def test_biases_start_at_zero_and_sinks_do_not() -> None:
    config = small_model(
        attention_bias=True,
        attention_out_bias=True,
        attention_sinks=True,
        moe=Moe(experts=4, top_k=2, ffn=16, biases=True),
    )
    found = dict(built(config, 4).named_parameters())
    biases = {name for name in found if name.endswith("bias")}
    assert len(biases) == 2 * 5
    assert not any(found[name].any() for name in biases)
    assert all(found[f"layers.{layer}.attention.sinks"].all() for layer in range(2))
