"""The coordinate check: plain settings do not transfer between widths, those of µP do."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from phalanx.config import ConfigError, Job, Model, Moe, job_from_table, resolve_model
from phalanx.model import Declaration, width_factors
from phalanx.model.declare import BIAS, REPLICATED, declared
from phalanx.model.moe import MoeLayer
from phalanx.train.width.coordinates import Coordinate, coordinates, model_at_width

SHAPE = {"dim": 128, "layers": 2, "heads": 8, "ffn": 256, "vocab": 256}
WIDTHS = (128, 512)


def small(**sections: dict[str, Any]) -> Job:
    table: dict[str, Any] = {"model": dict(SHAPE), "optimizer": {"learning_rate": 3e-3}}
    for name, values in sections.items():
        table[name] = {**table.get(name, {}), **values}
    return job_from_table(table)


@cache
def found(width_base: int) -> dict[str, Coordinate]:
    job = small(model={"width_base": width_base})
    return {one.name: one for one in coordinates(job, WIDTHS, 2, lambda _: None)}


def test_plain_settings_move_wide_models_further() -> None:
    plain = found(0)
    assert {"embed", "layers.0.attention", "layers.1.mlp", "layers.1", "logits"} <= plain.keys()
    assert plain["layers.1"].slope > 1 and not plain["layers.1"].steady


def test_scaled_settings_move_every_width_alike() -> None:
    plain, scaled = found(0), found(128)
    assert all(one.steady for one in scaled.values())
    for name in scaled.keys() - {"embed"}:
        assert abs(scaled[name].slope) < plain[name].slope
    at_base = {name: one.moved[0] for name, one in plain.items()}
    assert {name: one.moved[0] for name, one in scaled.items()} == at_base, "there nothing changes"


@pytest.mark.parametrize(
    ("declaration", "dims", "factors"),
    [
        (REPLICATED, 2, (0.5, 0.25)),
        (REPLICATED, 1, (1.0, 1.0)),
        (BIAS, 2, (1.0, 1.0)),
        (Declaration(width="output"), 2, (0.25, 0.25)),
        (Declaration(width="fixed"), 2, (1.0, 1.0)),
    ],
)
def test_factors_follow_from_what_a_parameter_is(
    declaration: Declaration, dims: int, factors: tuple[float, float]
) -> None:
    wide = Model(**{**SHAPE, "dim": 512, "width_base": 128})
    assert width_factors(declaration, wide, dims) == factors
    assert width_factors(declaration, Model(**SHAPE), dims) == (1.0, 1.0)


def test_routers_and_the_gate_of_shared_experts_end_in_something_fixed() -> None:
    experts = Moe(experts=4, top_k=2, ffn=16, shared_experts=1, shared_gate=True)
    layer = MoeLayer(32, experts)
    for module in (layer.router, layer.shared_gate):
        assert module is not None
        said = declared(module, "weight")
        assert said is not None and said.width == "output"


def test_a_wider_model_has_more_heads_of_the_same_size() -> None:
    moe = Moe(experts=4, top_k=2, ffn=32, shared_experts=1)
    wide = model_at_width(resolve_model(Model(**SHAPE, moe=moe)), 256)
    assert (wide.dim, wide.heads, wide.kv_heads, wide.head_dim) == (256, 16, 16, 16)
    assert wide.moe is not None and (wide.moe.ffn, wide.moe.shared_ffn) == (64, 64)


def test_a_width_that_splits_a_head_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--widths = 72: model.heads = 8.*multiples of 16"):
        model_at_width(resolve_model(Model(**SHAPE)), 72)
