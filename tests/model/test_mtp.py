"""Multi-token prediction: what it learns, what it leaves alone, and where it has no label."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.config import ConfigError, Model, MultiTokenPrediction, resolve_model
from phalanx.model import PredictionLayer, Transformer, make_model
from phalanx.model.mtp import NO_LABEL, look_ahead
from tests.model.small_models import built, plain_context, small_model

SEQUENCE = 8


def sample() -> tuple[Tensor, Tensor]:
    window = torch.randint(0, 61, (2, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    labels = window[:, 1:].clone()
    labels[0, 3] = -100
    return window[:, :-1], labels


def predicting(layers: int = 2, weight: float = 0.5) -> Transformer:
    mtp = MultiTokenPrediction(layers=layers, weight=weight)
    return built(small_model(mtp=mtp), SEQUENCE)


def by_the_textbook(model: Transformer, tokens: Tensor, labels: Tensor) -> Tensor:
    """The next token's loss, and the mean of those further on with its weight."""
    assert model.embed is not None and model.norm is not None and model.head is not None
    context = plain_context(model)
    x = model.embed(tokens)
    layers = list(model.layers.values())
    trunk = [layer for layer in layers if not isinstance(layer, PredictionLayer)]
    for layer in trunk:
        x = layer(x, context)
    x = model.norm(x)
    head = model.head.weight
    total = F.cross_entropy((x @ head.T).flatten(0, 1), labels.flatten(), reduction="sum")
    ahead = layers[len(trunk) :]
    for depth, layer in enumerate(ahead, 1):
        block = cast(PredictionLayer, layer)
        later, x = model.embed(tokens[:, depth:]), x[:, :-1]
        merged = block.merge(torch.cat((block.token_norm(later), block.state_norm(x)), -1))
        shorter = context._replace(
            cos=context.cos[: merged.shape[1]], sin=context.sin[: merged.shape[1]]
        )
        x = block.out_norm(super(PredictionLayer, block).forward(merged, shorter))
        found = F.cross_entropy(
            (x @ head.T).flatten(0, 1), labels[:, depth:].flatten(), reduction="sum"
        )
        assert model.config.mtp is not None
        total = total + found * model.config.mtp.weight / len(ahead)
    return total


def test_gradients_are_those_of_both_losses() -> None:
    model, (tokens, labels) = predicting(), sample()
    model(tokens, labels).backward()
    found = {name: cast(Tensor, p.grad).clone() for name, p in model.named_parameters()}
    model.zero_grad()
    by_the_textbook(model, tokens, labels).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and found[name].abs().max() > 0, name
        torch.testing.assert_close(found[name], parameter.grad, rtol=2e-5, atol=1e-5)


def test_a_step_tells_the_loss_of_the_next_token_alone() -> None:
    model, plain, (tokens, labels) = predicting(), built(small_model(), SEQUENCE), sample()
    torch.testing.assert_close(model(tokens, labels), plain(tokens, labels), rtol=0, atol=0)
    torch.testing.assert_close(model(tokens), plain(tokens), rtol=0, atol=0)


def test_validation_and_logits_leave_the_layers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (tokens, labels) = predicting(), sample()

    def refuse(*_: object) -> None:
        raise AssertionError("it ran")

    monkeypatch.setattr(PredictionLayer, "forward", refuse)
    model(tokens)
    model.eval()(tokens, labels)
    with pytest.raises(AssertionError, match="it ran"):
        model.train()(tokens, labels)


def test_looking_ahead_ends_with_the_sample_and_with_a_document() -> None:
    tokens, labels = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[2, 3, -100, 5, 6]])
    following, targets = look_ahead(tokens, labels, None, 1)
    assert following[0, :4].tolist() == [2, 3, 4, 5]
    assert targets.tolist() == [[3, NO_LABEL, 5, 6, NO_LABEL]]
    documents = torch.tensor([[0, 0, 0, 1, 1]])
    assert look_ahead(tokens, labels, documents, 2)[1].tolist() == [[-100] * 5]
    assert look_ahead(tokens, labels, documents, 1)[1].tolist() == [[3, -100, -100, 6, -100]]
    assert labels.tolist() == [[2, 3, -100, 5, 6]]


OWN = """
from phalanx.model import Layer, Transformer

class Whole(Transformer):
    def forward(self, x, labels=None, documents=None):
        return super().forward(x, labels, documents)

class Nothing(Layer):
    def __init__(self, config, index):
        super().__init__()

    def forward(self, x, context):
        return x
"""


def test_own_layers_predict_too_and_an_own_forward_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_predicting.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    shape = {"dim": 32, "layers": 1, "heads": 4, "ffn": 48, "vocab": 61}
    mtp = MultiTokenPrediction()
    config = resolve_model(Model(**shape, module="own_predicting:Nothing", mtp=mtp))
    names = [type(layer).__name__ for layer in make_model(config).layers.values()]
    assert names == ["Nothing", "PredictionNothing"]
    with pytest.raises(ConfigError, match=r"a forward of its own.*model\.mtp"):
        make_model(resolve_model(Model(**shape, module="own_predicting:Whole", mtp=mtp)))
