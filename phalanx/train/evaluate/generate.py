"""Text generation: greedy, or sampled with a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.cache import KeyValueCache, can_cache
from phalanx.train.evaluate.loaded import LoadedModel

PROMPT_TOKENS = 1024  # of all rows, that pass through the model at a time
_SPREAD = 1_000_003  # between the seeds of the first prompts of two samplings

Forward = Callable[[Tensor], Tensor]  # the next tokens [batch, new] -> their logits


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens, and how many."""

    most_tokens: int = 64
    temperature: float = 0.0  # 0: always the likeliest
    top_p: float = 1.0  # of the likeliest tokens so many that they have this share
    seed: int = 0
    stops: tuple[str, ...] = ()  # texts that end it, beside the token that ends documents


def generate(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    numbers: Sequence[int] | None = None,
) -> list[list[int]]:
    """Generate tokens after each prompt, up to the end of the document or a stop text.

    What is drawn after a prompt depends on the seed and its number (0, 1, … unless given) alone.
    """
    if not prompts:
        return []
    if not can_cache(loaded.model) and len(prompts) > 1:
        at = numbers or range(len(prompts))
        return [
            generate(loaded, [prompt], sampling, [number])[0]
            for prompt, number in zip(prompts, at, strict=True)
        ]
    writers = [_Writer(loaded, sampling, i) for i in numbers or range(len(prompts))]
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    rows = [[0] * before + list(prompt) for before, prompt in zip(padding, prompts, strict=True)]
    tokens = torch.tensor(rows, device=loaded.device)
    with _forward(loaded, longest + sampling.most_tokens, padding) as forward:
        step = max(1, PROMPT_TOKENS // len(prompts))
        for first in range(0, longest, step):
            logits = forward(tokens[:, first : first + step])[:, -1]
        for number in range(sampling.most_tokens):
            chosen = [writer.choose(row) for writer, row in zip(writers, logits, strict=True)]
            if number == sampling.most_tokens - 1 or all(writer.ended for writer in writers):
                break
            logits = forward(torch.tensor(chosen, device=loaded.device)[:, None])[:, -1]
    return [writer.tokens for writer in writers]


@contextmanager
def _forward(loaded: LoadedModel, capacity: int, padding: list[int]) -> Iterator[Forward]:
    """With a key-value cache; a model that mixes tokens outside attention recomputes the text."""
    model, device = loaded.model, loaded.device
    if not can_cache(model):
        yield _Uncached(loaded).forward
        return
    before = torch.tensor(padding, device=device) if any(padding) else None
    with KeyValueCache(model, capacity, before, loaded.tensor) as cache:
        yield cache.forward


class _Uncached:
    """Passes the whole text through the model for each new token."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.tokens = torch.empty((1, 0), dtype=torch.int64, device=loaded.device)

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor:
        self.tokens = torch.cat((self.tokens, tokens), 1)
        model, count = self.loaded.model, self.tokens.shape[1]
        padded = F.pad(self.tokens, (0, -count % self.loaded.tensor))
        model.prepare(torch.arange(padded.shape[1], device=self.loaded.device))
        logits: Tensor = model(padded)
        return logits[:, :count]


class _Writer:
    """One text during generation."""

    def __init__(self, loaded: LoadedModel, sampling: Sampling, number: int) -> None:
        self.sampling, self.codec = sampling, loaded.codec
        self.tokens: list[int] = []
        self.ended = False
        self._chance = torch.Generator().manual_seed((sampling.seed * _SPREAD + number) % 2**63)

    def choose(self, logits: Tensor) -> int:
        """Choose the next token from logits [vocab]; irrelevant for a text that has ended."""
        if self.ended:
            return 0
        token = choose_token(logits, self.sampling, self._chance)
        if self.codec is not None and token == self.codec.end:
            self.ended = True
            return token
        self.tokens.append(token)
        self.ended = self._stops()
        return token

    def _stops(self) -> bool:
        if self.codec is None or not self.sampling.stops:
            return False
        # A stop of so many letters lies within as many tokens and one that it began in.
        tail = self.tokens[-(max(map(len, self.sampling.stops)) + 1) :]
        text = self.codec.decode(tail, special=True)
        return any(stop and stop in text for stop in self.sampling.stops)


def choose_token(logits: Tensor, sampling: Sampling, chance: torch.Generator) -> int:
    """Choose a token from logits [vocab]."""
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    shares = (logits.double().cpu() / sampling.temperature).softmax(-1)
    ranked, order = shares.sort(descending=True, stable=True)
    # A token stays while those before it have less than the share that is asked for.
    ranked = ranked * (ranked.cumsum(-1) - ranked < sampling.top_p)
    return int(order[torch.multinomial(ranked, 1, generator=chance)])
