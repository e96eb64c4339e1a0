"""Parameters are declared where they are made; what nobody declared starts as is usual."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.config import Moe
from phalanx.model import ROWS, Declaration, Transformer, declarations, declare, declared
from tests.model.small_models import small_model


def test_the_last_declaration_counts_and_survives_another_class() -> None:
    linear = nn.Linear(4, 8, bias=False)
    declare(linear, weight=ROWS)
    declare(linear, weight=Declaration(split=1))
    linear.__class__ = type("Other", (nn.Linear,), {})
    assert declared(linear, "weight") == Declaration(split=1)
    assert declared(linear, "bias") is None


def test_a_parameter_that_is_not_there_cannot_be_declared() -> None:
    with pytest.raises(KeyError, match="Linear has no parameter scale"):
        declare(nn.Linear(4, 8), scale=ROWS)


def test_torchs_own_norms_start_at_one_and_biases_at_zero() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    found = dict(declarations(module))
    assert found["1.weight"].start == 1.0 and found["1.weight"].decay is False
    assert found["0.bias"].std == found["1.bias"].std == 0.0
    assert found["0.weight"] == Declaration()


def test_a_shared_parameter_is_declared_once() -> None:
    with torch.device("meta"):
        model = Transformer(small_model(tied_embedding=True))
    names = [name for name, _ in declarations(model)]
    assert len(names) == len(set(names)) == len(list(model.parameters()))


def test_fused_matrices_say_whose_rows_alternate() -> None:
    config = small_model(moe=Moe(experts=4, top_k=2, ffn=16, first_dense_layers=1))
    with torch.device("meta"):
        found = dict(declarations(Transformer(config)))
    assert found["layers.0.attention.qkv.weight"].fused == (16, 8, 8)
    assert found["layers.0.mlp.gate_up.weight"].fused == (24, 24)
    assert found["layers.1.moe.experts.gate_up"].fused == (16, 16)
    assert found["layers.0.attention.out.weight"].fused == ()
