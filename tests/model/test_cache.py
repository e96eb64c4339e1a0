"""Text written token by token with remembered keys has the logits of the whole text at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.config import (
    PRESETS,
    LatentAttentionShape,
    Model,
    Moe,
    RopeScaling,
    Window,
    resolve_model,
)
from phalanx.model import Layer, Transformer
from phalanx.model.cache import KeyValueCache, can_cache
from phalanx.train.parity.shrink import VOCAB, shrunken_model
from tests.model.small_models import built, small_model

LATENT = LatentAttentionShape(
    query_rank=12, key_value_rank=10, content_head_dim=8, rope_head_dim=4, value_head_dim=6
)
FORMS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "latent": {"kv_heads": 4, "latent": LATENT},
    "windows": {"window": Window(size=3, full_every=2, rope_theta=100.0)},
    "sinks": {"attention_sinks": True, "window": Window(size=4)},
    "soft caps": {"attention_softcap": 5.0, "logit_softcap": 3.0, "attention_scale": 0.5},
    "normed queries": {"qk_norm": True, "rotary_fraction": 0.5, "nope_every": 2},
    "YaRN": {"rope_scaling": RopeScaling(kind="yarn", original_context=8)},
    "experts": {"moe": Moe(experts=4, top_k=2, ffn=16, shared_experts=1)},
}
TOKENS = 14


def text(vocab: int, rows: int = 2) -> Tensor:
    return torch.randint(0, vocab, (rows, TOKENS), generator=torch.Generator().manual_seed(7))


def whole(model: Transformer, tokens: Tensor) -> Tensor:
    model.prepare(torch.arange(tokens.shape[1]))
    with torch.no_grad():
        logits: Tensor = model.eval()(tokens)
    return logits


def piecewise(model: Transformer, tokens: Tensor, *sizes: int, **options: Any) -> Tensor:
    """Logits of pieces of these sizes, and of single tokens after them."""
    rest = tokens.shape[1] - sum(sizes)
    with KeyValueCache(model.eval(), tokens.shape[1], **options) as cache:
        parts = [cache.forward(part) for part in tokens.split([*sizes, *[1] * rest], 1)]
    return torch.cat(parts, 1)


def assert_cached_equals_whole(config: Model, vocab: int) -> None:
    model, tokens = built(config, TOKENS), text(vocab)
    expected = whole(model, tokens)
    torch.testing.assert_close(piecewise(model, tokens, 5, 4), expected, rtol=1e-5, atol=1e-5)
    # The model is as it was before the cache was opened.
    torch.testing.assert_close(whole(model, tokens), expected, rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_attention(form: str) -> None:
    assert_cached_equals_whole(small_model(**FORMS[form]), 61)


@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset(preset: str) -> None:
    assert_cached_equals_whole(shrunken_model(resolve_model(Model(preset=preset))), VOCAB)


@pytest.mark.parametrize("form", ["grouped", "latent", "windows", "sinks"])
def test_padding_in_front_of_shorter_rows_is_seen_by_nobody(form: str) -> None:
    model = built(small_model(**FORMS[form]), TOKENS)
    tokens, short = text(61), 5
    tokens[0, :short] = 3
    padding = torch.tensor([short, 0])
    found = piecewise(model, tokens, 8, padding=padding)
    expected = whole(model, tokens[:1, short:])
    torch.testing.assert_close(found[:1, short:], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1:], whole(model, tokens[1:]), rtol=1e-5, atol=1e-5)


def test_pieces_are_filled_up_to_what_a_model_takes() -> None:
    """Under tensor parallelism ranks share out the positions: their number is a multiple."""
    model, tokens = built(small_model(), TOKENS), text(61)
    found = piecewise(model, tokens, 5, multiple=4)
    torch.testing.assert_close(found, whole(model, tokens), rtol=1e-5, atol=1e-5)


class Mixing(Layer):
    """Tokens meet in a sum of all before."""

    def forward(self, x: Tensor, context: object) -> Tensor:
        return x + x.cumsum(1)


def test_a_layer_that_mixes_tokens_by_itself_cannot_be_cached() -> None:
    model = built(small_model(), TOKENS)
    assert can_cache(model)
    model.layers["1"] = Mixing()
    assert not can_cache(model)
    own = type("Own", (Transformer,), {"forward": lambda self, x: x})
    assert not can_cache(own(small_model()))
