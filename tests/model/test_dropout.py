"""Dropout: what is dropped follows from seed, sample, position and place, and from nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.model import Dropout, Transformer, key_of
from phalanx.model.layers import token_keys
from tests.model.small_models import built, small_model
from tests.parallel.random_jobs.plain_dropout import kept_share

CPU = torch.device("cpu")
SAMPLES = torch.tensor([3, 2**40, 3])  # the first again as the last
BATCH, LENGTH, WIDTH = 3, 64, 96


def dropout(rate: float, place: str = "layers.0.mlp_dropout", seed: int = 7) -> Dropout:
    made = Dropout(rate)
    made.reset(key_of(seed, place), CPU)
    return made


def mask(made: Dropout, samples: Tensor = SAMPLES, first: int = 0) -> Tensor:
    """What ones become."""
    keys = token_keys(samples, torch.arange(first, LENGTH))
    out: Tensor = made(torch.ones(len(samples), LENGTH - first, WIDTH), keys)
    return out


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_so_many_are_dropped_and_the_others_make_up_for_them(rate: float) -> None:
    found = mask(dropout(rate), torch.arange(8))
    assert (found == 0).double().mean().item() == pytest.approx(rate, abs=4e-3)
    assert found.max().item() == pytest.approx(1 / (1 - rate))
    assert found.mean().item() == pytest.approx(1, abs=0.05)
    by_channel, by_token = ((found == 0).double().mean(dims) for dims in ((0, 1), (0, 2)))
    assert by_channel.std() < 0.03 and by_token.std() < 0.03  # nobody is preferred


def test_the_mask_is_that_of_the_plain_reference() -> None:
    expected = kept_share(torch.ones(BATCH, LENGTH, WIDTH), 0.3, 7, "dropout", SAMPLES)
    assert torch.equal(mask(dropout(0.3, "dropout")), expected)


def test_the_same_token_of_a_sample_has_the_same_mask_wherever_it_lies() -> None:
    made = dropout(0.3)
    whole = mask(made)
    assert torch.equal(whole[0], whole[2])
    assert torch.equal(mask(made, SAMPLES[1:2], first=40), whole[1:2, 40:])


def test_other_samples_positions_places_and_seeds_have_other_masks() -> None:
    whole = mask(dropout(0.5))
    others = [
        whole[1],
        whole[0].roll(1, 0),
        whole[0].roll(1, 1),
        mask(dropout(0.5, "layers.1.mlp_dropout"))[0],
        mask(dropout(0.5, "layers.0.attention_dropout"))[0],
        mask(dropout(0.5, seed=8))[0],
    ]
    for other in others:
        assert (other == whole[0]).double().mean().item() == pytest.approx(0.5, abs=0.03)


def test_gradients_are_dropped_where_values_are() -> None:
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    made = dropout(0.3)
    made(x, token_keys(SAMPLES, torch.arange(LENGTH))).backward(torch.ones_like(x))
    assert x.grad is not None and torch.equal(x.grad, mask(made))


def run(model: Transformer, samples: Tensor | None) -> Tensor:
    tokens = torch.arange(3 * 16).view(3, 16) % 61
    logits: Tensor = model(tokens, samples=samples)
    return logits


def test_training_drops_by_the_samples_numbers_and_evaluation_drops_nothing() -> None:
    model = built(small_model(dropout=0.2), 16)
    plain = built(small_model(), 16)
    for name, module in model.named_modules():
        if isinstance(module, Dropout):
            module.reset(key_of(0, name), CPU)
    assert torch.equal(run(model.eval(), None), run(plain, None))
    first, again, other = (run(model.train(), SAMPLES + n) for n in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    with pytest.raises(AssertionError, match="samples' numbers"):
        run(model, None)
