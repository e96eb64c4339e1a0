"""Norm and feed-forward layers, and the row order that lets them be split over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from phalanx.config import gate_up_groups
from phalanx.model import RMSNorm
from phalanx.model.layers import ACTIVATIONS, PlainMlp, SwiGLU, dense_mlp
from tests.model.small_models import built, plain_context, small_model


def randomized(module: torch.nn.Module) -> Any:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return module


def hidden(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_divides_by_the_root_mean_square_in_fp32(dtype: torch.dtype) -> None:
    norm = randomized(RMSNorm(48, eps=0.1)).to(dtype)
    x = (100 * hidden(3, 48)).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 0.1).sqrt() * norm.weight.double()
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7  # one rounding of the result
    torch.testing.assert_close(norm(x).double(), expected, rtol=tolerance, atol=tolerance)
    assert norm(x).dtype == dtype


def test_joining_a_branch_returns_the_sum_and_its_norm() -> None:
    norm = randomized(RMSNorm(16, eps=1e-5))
    x, branch = hidden(2, 16), 3 * hidden(2, 16)
    total, normed = norm.join(x, branch)
    assert torch.equal(total, x + branch)
    assert torch.equal(normed, norm(x + branch))


@pytest.mark.parametrize("ffn", [16, 48, 64, 1024, 1040])
def test_swiglu_pairs_gates_and_ups_by_group(ffn: int) -> None:
    layer = randomized(SwiGLU(8, ffn))
    x = hidden(5, 8)
    rows = layer.gate_up.weight.view(gate_up_groups(ffn), 2, -1, 8)
    gate, up = rows[:, 0].reshape(ffn, 8), rows[:, 1].reshape(ffn, 8)
    expected = (F.silu(x @ gate.t()) * (x @ up.t())) @ layer.down.weight.t()
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("ffn", [64, 192])
def test_slices_of_swiglu_add_up_to_the_whole(ranks: int, ffn: int) -> None:
    """A contiguous part of the rows of gate_up with the same columns of down is a layer, too."""
    assert gate_up_groups(ffn) % ranks == 0
    whole = randomized(SwiGLU(8, ffn))
    x = hidden(5, 8)
    total = torch.zeros(5, 8)
    for up, down in zip(
        whole.gate_up.weight.chunk(ranks), whole.down.weight.chunk(ranks, dim=1), strict=True
    ):
        part: Any = SwiGLU(8, ffn)  # its groups are the whole layer's, as on a rank
        part.gate_up.weight, part.down.weight = (torch.nn.Parameter(t) for t in (up, down))
        total += part(x)
    torch.testing.assert_close(total, whole(x), rtol=1e-4, atol=1e-5)


def test_slices_of_attention_add_up_to_the_whole() -> None:
    """Rows of qkv by key/value head, with the columns of out that belong to its queries."""
    model = built(small_model(qk_norm=True), 6)
    attention: Any = model.layers["0"].attention
    x, context = hidden(2, 6, 32), plain_context(model)
    expected = attention(x, context)
    rows, columns = attention.qkv.weight.chunk(2), attention.out.weight.chunk(2, dim=1)
    total = torch.zeros_like(expected)
    for row, column in zip(rows, columns, strict=True):
        attention.qkv.weight, attention.out.weight = (torch.nn.Parameter(t) for t in (row, column))
        total += attention(x, context)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("mlp", "approximate"), [("geglu", "tanh"), ("geglu-exact", "none")])
def test_geglu_pairs_gates_and_ups_by_group(mlp: str, approximate: str) -> None:
    layer = randomized(dense_mlp(small_model(mlp=mlp, ffn=64)))
    x = hidden(5, 32)
    rows = layer.gate_up.weight.unflatten(0, (gate_up_groups(64), 2, -1))
    gate, up = (x @ rows[:, i].flatten(0, 1).t() for i in range(2))
    expected = (F.gelu(gate, approximate=approximate) * up) @ layer.down.weight.t()
    torch.testing.assert_close(layer(x), expected)


def test_clamped_swiglu_limits_both_halves_and_adds_one_to_ups() -> None:
    layer = randomized(dense_mlp(small_model(mlp="swiglu-clamped", ffn=64)))
    x = 20 * hidden(5, 32)
    rows = layer.gate_up.weight.unflatten(0, (gate_up_groups(64), 2, -1))
    gate, up = (x @ rows[:, i].flatten(0, 1).t() for i in range(2))
    assert gate.max() > 7 and up.min() < -7, "else nothing is clamped"
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    expected = (gate * torch.sigmoid(1.702 * gate) * (up + 1)) @ layer.down.weight.t()
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize(
    ("mlp", "activation"),
    [("gelu-exact", F.gelu), ("relu2", lambda x: x.clamp(min=0) ** 2)],
)
def test_plain_layers_differ_by_their_activation(mlp: str, activation: Any) -> None:
    layer = randomized(dense_mlp(small_model(mlp=mlp)))
    x = hidden(5, 32)
    expected = activation(x @ layer.up.weight.t()) @ layer.down.weight.t()
    torch.testing.assert_close(layer(x), expected)


def test_a_norm_with_an_offset_begins_as_the_plain_one_does() -> None:
    plain, offset = (built(small_model(norm_offset=given), 8).norm for given in (False, True))
    assert plain is not None and offset is not None
    x = hidden(3, 32)
    assert torch.equal(offset.weight, torch.zeros(32))
    assert torch.equal(plain(x), offset(x))


def test_the_gelu_layer_has_two_matrices() -> None:
    layer = randomized(PlainMlp(8, 24, ACTIVATIONS["gelu"]))
    x = hidden(5, 8)
    expected = F.gelu(x @ layer.up.weight.t(), approximate="tanh") @ layer.down.weight.t()
    torch.testing.assert_close(layer(x), expected)
