"""Text is the likeliest, or drawn by a seed: the same alone, beside others and over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx.train.evaluate.generate import Sampling, choose_token, generate
from phalanx.train.evaluate.loaded import LoadedModel
from phalanx.train.evaluate.score import ModelScorer
from tests.shared_ranks import SharedRanks
from tests.train.evaluate.small_checkpoint import opened

PROMPTS = ([5, 6, 7], [9], [40, 41, 42, 43, 44, 45, 46])
GREEDY = Sampling(most_tokens=8)
DRAWN = Sampling(most_tokens=8, temperature=1.3, top_p=0.9, seed=3)


def likeliest(loaded: LoadedModel, prompt: list[int], count: int) -> list[int]:
    """The whole text through the model for each token."""
    text = list(prompt)
    for _ in range(count):
        loaded.model.prepare(torch.arange(len(text)))
        with torch.no_grad():
            token = int(loaded.model(torch.tensor([text]))[0, -1].argmax())
        assert loaded.codec is not None
        if token == loaded.codec.end:
            break
        text.append(token)
    return text[len(prompt) :]


def test_without_temperature_each_token_is_the_likeliest(checkpoint: Path) -> None:
    loaded = opened(checkpoint)
    expected = [likeliest(loaded, prompt, 8) for prompt in PROMPTS]
    assert generate(loaded, PROMPTS, GREEDY) == expected
    assert any(expected)


def test_what_is_drawn_depends_on_seed_and_number_alone(checkpoint: Path) -> None:
    loaded = opened(checkpoint)
    together = generate(loaded, PROMPTS, DRAWN)
    assert generate(loaded, PROMPTS, DRAWN) == together
    alone = [generate(loaded, [prompt], DRAWN, [i])[0] for i, prompt in enumerate(PROMPTS)]
    assert alone == together
    other = Sampling(most_tokens=8, temperature=1.3, top_p=0.9, seed=4)
    assert generate(loaded, PROMPTS, other) != together
    same_prompt = generate(loaded, [PROMPTS[0], PROMPTS[0]], DRAWN)
    assert same_prompt[0] != same_prompt[1]


def write_together(checkpoint: Path, tensor: int) -> list[list[list[int]]]:
    scorer = ModelScorer(opened(checkpoint, tensor=tensor), rows=2)
    return [scorer.generate(PROMPTS, GREEDY), scorer.generate(PROMPTS, DRAWN)]


@pytest.mark.parametrize("tensor", [1, 2])
def test_ranks_write_what_one_process_writes(
    checkpoint: Path, tensor: int, shared_ranks: SharedRanks
) -> None:
    expected = write_together(checkpoint, 1)
    assert shared_ranks.run(2, write_together, checkpoint, tensor) == [expected] * 2


def test_a_text_ends_where_it_is_stopped(checkpoint: Path) -> None:
    loaded = opened(checkpoint)
    assert loaded.codec is not None
    (whole,) = generate(loaded, PROMPTS[:1], GREEDY)
    text = loaded.codec.decode(whole[:3], special=True)
    stopped = generate(loaded, PROMPTS[:1], Sampling(most_tokens=8, stops=(text[-2:],)))[0]
    assert stopped == whole[: len(stopped)] and len(stopped) <= 3
    ends_at_once = loaded.codec._replace(end=whole[0])
    loaded.codec = ends_at_once
    assert generate(loaded, PROMPTS[:1], GREEDY) == [[]]


def test_layers_that_cannot_be_cached_write_the_same(checkpoint: Path) -> None:
    loaded = opened(checkpoint)
    expected = generate(loaded, PROMPTS, DRAWN)
    for layer in loaded.model.layers.values():
        layer.splits_sequence = False  # type: ignore[assignment]
    assert generate(loaded, PROMPTS, DRAWN) == expected


def test_tokens_outside_the_share_are_never_drawn() -> None:
    logits = torch.tensor([0.0, 3.0, 2.0, -1.0])
    chance = torch.Generator().manual_seed(0)
    narrow = Sampling(temperature=1.0, top_p=0.5)
    assert {choose_token(logits, narrow, chance) for _ in range(50)} == {1}
    wider = Sampling(temperature=1.0, top_p=0.9)
    assert {choose_token(logits, wider, chance) for _ in range(200)} == {1, 2}
    all_of_them = Sampling(temperature=5.0)
    drawn = [choose_token(logits, all_of_them, chance) for _ in range(2000)]
    shares = torch.bincount(torch.tensor(drawn)) / 2000
    torch.testing.assert_close(shares, (logits / 5).softmax(-1), atol=0.05, rtol=0)
    assert choose_token(logits, Sampling(), chance) == 1


def test_nothing_is_written_after_no_prompt(checkpoint: Path) -> None:
    assert generate(opened(checkpoint), [], GREEDY) == []
