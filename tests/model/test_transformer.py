"""The whole model: presets, tied weights, parts that make up the whole."""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.nn.functional as F

from phalanx.config import PRESETS, resolve_model
from phalanx.model import Transformer
from phalanx.plan import parameters
from tests.model.small_models import built, small_model


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_build_on_meta_with_the_counted_parameters(preset: str) -> None:
    config = resolve_model(PRESETS[preset])
    with torch.device("meta"):
        model = Transformer(config)
    count = parameters(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == count.total
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.layers.values()]
    assert tuple(layers) == count.per_layer


def sample() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    window = torch.randint(0, 61, (2, 9), generator=generator)
    labels = window[:, 1:].clone()
    labels[0, 3] = -100
    return window[:, :-1], labels


def test_the_loss_is_the_weighted_sum_over_real_labels() -> None:
    model = built(small_model(), 8)
    tokens, labels = sample()
    model.token_weight = torch.tensor(0.25)
    expected = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    found = model(tokens, labels)
    assert found.shape == (1,)
    torch.testing.assert_close(found[0], 0.25 * expected)


def test_a_tied_head_is_the_embedding_and_collects_both_gradients() -> None:
    tied, untied = built(small_model(tied_embedding=True), 8), built(small_model(), 8)
    assert tied.embed is not None and tied.head is not None
    assert untied.embed is not None and untied.head is not None
    assert tied.head.weight is tied.embed.weight
    assert "head.weight" not in dict(tied.named_parameters())
    untied.head.weight.data.copy_(untied.embed.weight)
    tokens, labels = sample()
    for model in (tied, untied):
        model(tokens, labels).backward()
    assert untied.embed.weight.grad is not None and untied.head.weight.grad is not None
    both = untied.embed.weight.grad + untied.head.weight.grad
    torch.testing.assert_close(tied.embed.weight.grad, both)
    assert untied.embed.weight.grad.abs().max() > 1e-3


def test_parts_in_a_row_are_the_whole_model() -> None:
    config = small_model(layers=3)
    model = built(config, 8)
    tokens, _ = sample()
    parts = [
        Transformer(config, range(1), head=False),
        Transformer(config, range(1, 3), embed=False),
    ]
    x = tokens
    for part in parts:
        state = {k: v for k, v in model.state_dict().items() if k in part.state_dict()}
        part.load_state_dict(state)
        part.prepare(torch.arange(8))
        x = part(x)
    torch.testing.assert_close(x, model(tokens), rtol=0, atol=0)
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_weights_change_the_loss_in_every_layer() -> None:
    model = built(small_model(qk_norm=True, mlp="gelu"), 8)
    model(*sample()).backward()
    for name, parameter in model.named_parameters():
        gradient = cast(torch.Tensor, parameter.grad)
        assert gradient.abs().max() > 0, name
