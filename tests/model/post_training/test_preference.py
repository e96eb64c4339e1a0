"""The loss of pairs is DPO's, whatever else lies in the sample."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.config import Adapter, Job, Preference
from phalanx.model import Transformer, prepare_post_training
from phalanx.model.post_training.adapters import MARK, without_adapters
from phalanx.model.post_training.preference import pair_loss_of
from tests.model.small_models import built, small_model

SEQUENCE, BETA = 21, 0.3
# Lengths of documents, and where in each its answer begins.
PAIRS = [[((5, 3), (4, 2)), ((6, 3), (4, 3))], [((7, 4), (9, 2))]]


def preferring(learned: float = 0.3) -> Transformer:
    config = small_model()
    model = built(config, SEQUENCE)
    adapter, preference = Adapter(kind="lora", rank=3), Preference(kind="dpo", beta=BETA)
    prepare_post_training(model, Job(model=config, adapter=adapter, preference=preference))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if MARK in name:
                parameter.copy_(torch.randn(parameter.shape) * learned)
    return model


def samples() -> tuple[Tensor, Tensor, Tensor, list[list[list[tuple[Tensor, int]]]]]:
    """Tokens, labels and documents of two samples, and the documents one by one."""
    torch.manual_seed(2)
    tokens = torch.randint(0, 61, (2, SEQUENCE))
    labels = torch.full((2, SEQUENCE), -100)
    documents = torch.zeros(2, SEQUENCE, dtype=torch.int32)
    alone: list[list[list[tuple[Tensor, int]]]] = []
    for row, pairs in enumerate(PAIRS):
        at = number = 0
        alone.append([])
        for pair in pairs:
            alone[row].append([])
            for length, answer in pair:
                alone[row][-1].append((tokens[row, at : at + length], answer))
                inside = slice(at + answer - 1, at + length - 1)
                labels[row, inside] = tokens[row, at + answer : at + length]
                documents[row, at:] = number  # padding stays with the last one
                at, number = at + length, number + 1
    return tokens, labels, documents, alone


def answer_score(model: Transformer, tokens: Tensor, answer: int) -> Tensor:
    """Log-probability of a document's answer, by itself."""
    padded = F.pad(tokens, (0, SEQUENCE - len(tokens)))[None]
    shares = Transformer.forward(model, padded)[0].log_softmax(-1)
    return sum(shares[at - 1, tokens[at]] for at in range(answer, len(tokens)))  # type: ignore[return-value]


def test_the_loss_is_that_of_pairs_one_by_one() -> None:
    model, (tokens, labels, documents, alone) = preferring(), samples()
    model.token_weight.fill_(1 / 3)
    losses = []
    for pairs in alone:
        for pair in pairs:
            ours = [answer_score(model, *document) for document in pair]
            with without_adapters(model):
                theirs = [answer_score(model, *document) for document in pair]
            rewards = [BETA * (a - b) for a, b in zip(ours, theirs, strict=True)]
            losses.append(-F.logsigmoid(rewards[0] - rewards[1]))
    found = model(tokens, labels, documents)
    assert found.item() == pytest.approx(float(sum(losses).detach()) / 3, rel=1e-4)
    loss = pair_loss_of(model)
    assert loss is not None
    sums = loss.take_sums(torch.device("cpu"))
    assert sums.pairs == 3 and 0 <= sums.preferred <= 3
    assert loss.take_sums(torch.device("cpu")).pairs == 0  # they are taken once


def test_its_gradient_is_that_of_the_plain_formula() -> None:
    model, (tokens, labels, documents, alone) = preferring(0.2), samples()
    model(tokens, labels, documents).sum().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert found and all(MARK in name for name in found)
    model.zero_grad()
    total = torch.zeros(())
    for pairs in alone:
        for pair in pairs:
            ours = [answer_score(model, *document) for document in pair]
            with torch.no_grad(), without_adapters(model):
                theirs = [answer_score(model, *document) for document in pair]
            total = total - F.logsigmoid(BETA * (ours[0] - theirs[0] - ours[1] + theirs[1]))
    total.backward()
    for name, gradient in found.items():
        expected = model.get_parameter(name).grad
        assert expected is not None
        assert (gradient - expected).norm() < 1e-4 * expected.norm(), name


def test_untrained_adapters_prefer_nothing() -> None:
    model, (tokens, labels, documents, _) = preferring(0.0), samples()
    model.token_weight.fill_(1 / 3)
    assert model(tokens, labels, documents).item() == pytest.approx(math.log(2))


def test_a_validation_is_not_counted_among_the_rewards_of_training() -> None:
    model, (tokens, labels, documents, _) = preferring(), samples()
    with torch.no_grad():
        model(tokens, labels, documents)
    loss = pair_loss_of(model)
    assert loss is not None and loss.take_sums(torch.device("cpu")).pairs == 0
