"""Texts to score as padded rows of batches; scores do not depend on their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from phalanx.data import WEIGHTLESS, Batch

LEAST_WIDTH = 32  # of a row, in tokens; wider ones are powers of two, so that few shapes occur


class ScoreRequest(NamedTuple):
    """Tokens of which the last ``scored`` are asked for, given all before them."""

    tokens: tuple[int, ...]
    scored: int


class TokenScore(NamedTuple):
    """Log-likelihood of a request's scored tokens."""

    log_probability: float  # of all of them together, in nats
    greedy: bool  # each of them is the likeliest at its place


class Round(NamedTuple):
    """One forward pass of a replica: indices of its requests, and their rows."""

    numbers: list[int]
    batch: Batch


def request(context: Sequence[int], scored: Sequence[int], sequence: int) -> ScoreRequest:
    """A request cut from the left to the model's context length."""
    tokens = (*context, *scored)[-(sequence + 1) :]
    return ScoreRequest(tokens, min(len(scored), len(tokens) - 1))


def rolling(tokens: Sequence[int], start: int, sequence: int) -> Iterator[ScoreRequest]:
    """Requests that score every token of a text once, the first of them after ``start``.

    Texts that are longer than a model sees are cut into windows, of which the last one overlaps
    with the one before, so that its tokens have as much before them as there is.
    """
    whole = (start, *tokens)
    for first in range(0, len(tokens), sequence):
        past = min(first + sequence, len(tokens))
        yield ScoreRequest(whole[max(0, past - sequence) : past + 1], past - first)


def rounds(
    requests: Sequence[ScoreRequest],
    rows: int,
    replica: int,
    replicas: int,
    *,
    sequence: int,
    fixed_width: bool = False,
    multiple: int = 1,
) -> Iterator[Round]:
    """This replica's forward passes, as many as every other replica has; the longest come first.

    ``sequence``: the widest row; ``fixed_width``: all have that width; ``multiple``: of this number
    of tokens they are.
    """
    longest_first = sorted(range(len(requests)), key=lambda i: -len(requests[i].tokens))
    for first in range(0, len(requests), rows * replicas):
        together = longest_first[first : first + rows * replicas]
        longest = len(requests[together[0]].tokens) - 1
        width = sequence if fixed_width else _width(longest, sequence, multiple)
        own = together[replica * rows : (replica + 1) * rows]
        yield Round(own, _batch([requests[i] for i in own], rows, width))


def _width(longest: int, sequence: int, multiple: int) -> int:
    width = LEAST_WIDTH
    while width < longest:
        width *= 2
    width = max(min(width, sequence), longest)
    return -(-width // multiple) * multiple


def _batch(requests: Sequence[ScoreRequest], rows: int, width: int) -> Batch:
    """Rows padded on the right, where causal attention does not see it."""
    tokens = np.zeros((rows, width), np.int64)
    labels = np.full((rows, width), WEIGHTLESS, np.int64)
    for row, (text, scored) in enumerate(requests):
        last = len(text) - 1
        tokens[row, :last] = text[:-1]
        labels[row, last - scored : last] = text[last + 1 - scored :]
    return Batch(tokens, labels, None)
